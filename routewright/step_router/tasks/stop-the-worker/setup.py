import random
import sys

rng = random.Random(int(sys.argv[1]))
status, word = rng.randint(3, 90), "".join(rng.choices("abcdefghij", k=12))
with open("worker.py", "w") as file:
    file.write(f"""import hashlib, os, signal, sys, time


def stop(number, frame):
    digest = hashlib.sha256(open(__file__, "rb").read() + b"{word}").hexdigest()
    with open("report.txt", "w") as report:
        report.write(digest + "\\n")
    sys.exit({status})


time.sleep(0.1)
signal.signal(signal.SIGTERM, stop)
with open("worker.pid", "w") as pid:
    pid.write(str(os.getpid()))
for _ in range(100):
    time.sleep(0.1)
""")
with open("status", "w") as file:
    file.write("unknown\n")
