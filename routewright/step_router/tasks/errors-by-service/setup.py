import gzip
import os
import random
import sys

rng = random.Random(int(sys.argv[1]))
services = ["auth", "billing", "mail", "search", "upload"]
os.makedirs("logs")
for day in range(1, 5):
    lines = []
    for minute in range(40):
        level = rng.choices(["INFO", "WARN", "ERROR", "DEBUG"], weights=[5, 2, 3, 1])[0]
        message = rng.choice(["started", "retry after ERROR", "no such user", "disk almost full", "timeout"])
        lines.append(f"2024-05-{day:02d} 10:{minute:02d}:00 {level} {rng.choice(services)} {message}\n")
    data = "".join(lines).encode()
    with open(f"logs/day{day}.log" + (".gz" if day < 3 else ""), "wb") as file:
        file.write(gzip.compress(data, mtime=0) if day < 3 else data)
