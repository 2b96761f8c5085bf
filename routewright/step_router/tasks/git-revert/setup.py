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


limits = {name: rng.randint(10, 99) for name in ("depth", "width", "retries")}


def save():
    write("limits.txt", "".join(f"{name} = {value}\n" for name, value in limits.items()))


save()
commit("Add the limits")
write("notes.txt", f"note {rng.randint(0, 999)}\n")
commit("Add notes")
limits["width"] += 1000
save()
write("width.txt", "wrong\n")
commit("Tune the limits")
for number in range(rng.randint(1, 3)):
    write(f"later{number}.txt", f"later {rng.random()}\n")
    commit(f"Add later file {number}")
