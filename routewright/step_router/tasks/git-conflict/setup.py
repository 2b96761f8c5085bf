import os
import random
import subprocess
import sys

rng = random.Random(int(sys.argv[1]))
NAMES = {f"GIT_{role}_NAME": "Dev" for role in ("AUTHOR", "COMMITTER")}
NAMES |= {f"GIT_{role}_EMAIL": "dev@example.org" for role in ("AUTHOR", "COMMITTER")}
clock = 1_700_000_000


def git(*arguments):
    global clock
    clock += 60
    date = f"{clock} +0000"
    environment = {**os.environ, **NAMES, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    subprocess.run(["git", "-C", "repo", *arguments], env=environment, check=True, capture_output=True)


def write(name, text):
    with open(f"repo/{name}", "w") as file:
        file.write(text)


def commit(message):
    git("add", "-A")
    git("commit", "-q", "-m", message)


os.makedirs("repo")
git("init", "-q", "-b", "main")
git("config", "user.name", "Dev")
git("config", "user.email", "dev@example.org")

base = {"port": "8000", "name": "demo", "color": "grey", "mode": "plain"}


def save(values):
    write("settings.txt", "".join(f"{key}={value}\n" for key, value in values.items()))


save(base)
commit("Add settings")
git("checkout", "-q", "-b", "feature")
save({**base, "port": str(rng.randint(1000, 1999)), "color": rng.choice(["red", "blue", "teal"])})
write("feature.txt", f"feature {rng.random()}\n")
commit("Work on the feature")
git("checkout", "-q", "main")
save({**base, "port": str(rng.randint(2000, 2999)), "color": rng.choice(["pink", "lime", "gold"])})
write("main.txt", f"main {rng.random()}\n")
commit("Work on main")
