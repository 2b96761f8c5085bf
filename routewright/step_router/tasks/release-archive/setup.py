import os
import random
import sys

rng = random.Random(int(sys.argv[1]))
for folder in ("project", "project/src", "project/src/build", "project/build", "project/docs"):
    os.makedirs(folder)
    for name in rng.sample(["a.py", "b.md", "run.log", "builder.py", "login.txt", "catalog"], 4):
        with open(f"{folder}/{name}", "w") as file:
            file.write(f"{folder} {rng.random()}\n")
with open("project/src/trace.log", "w") as file:
    file.write("noise\n")
