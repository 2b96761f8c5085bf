import os
import random
import sys

rng = random.Random(int(sys.argv[1]))
for folder in ("site", "site/css", "site/bin", "site/private", "site/private/keys"):
    os.makedirs(folder, exist_ok=True)
    for index in range(rng.randint(2, 4)):
        path = f"{folder}/file {index}{rng.choice(['.sh', '.html', '.txt'])}"
        with open(path, "w") as file:
            file.write(f"{rng.random()}\n")
        os.chmod(path, rng.choice([0o600, 0o640, 0o666, 0o755, 0o777]))
with open("site/private/keys/deploy.sh", "w") as file:
    file.write("exit 0\n")
with open("site/bin/run.sh", "w") as file:
    file.write("exit 0\n")
for folder in ("site/css", "site/bin", "site/private", "site/private/keys"):
    os.chmod(folder, rng.choice([0o700, 0o750, 0o777, 0o775]))
