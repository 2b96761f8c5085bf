import os
import random
import sys

rng = random.Random(int(sys.argv[1]))
os.makedirs("logs/old.log")
for name in ("web", "db", "mail", "cron", "boot"):
    size = rng.choice([0, 500, 1000, 1001, 4000])
    for ending in (".log", ".txt"):
        path = f"logs/{name}{ending}"
        with open(path, "w") as file:
            file.write("".join(rng.choices("abc \n", k=size)))
        os.chmod(path, rng.choice([0o600, 0o640, 0o644]))
with open("logs/big.log", "w") as file:
    file.write("x" * 5000)
os.chmod("logs/big.log", 0o640)
with open("logs/old.log/inner.log", "w") as file:
    file.write("y" * 3000)
