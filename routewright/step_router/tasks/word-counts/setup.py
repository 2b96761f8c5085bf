import random
import sys

rng = random.Random(int(sys.argv[1]))
words = ["Router", "router", "agent", "Agent", "query", "step", "risk", "budget", "token", "model", "don't", "co-op"]
lines = []
for _ in range(40):
    chosen = rng.choices(words, weights=[rng.random() + 0.1 for _ in words], k=rng.randint(4, 9))
    lines.append(rng.choice([" ", ", ", "; "]).join(chosen) + rng.choice([".", "!", ""]))
with open("text.txt", "w") as file:
    file.write("\n".join(lines) + "\n")
