import random
import sys

rng = random.Random(int(sys.argv[1]))
names = ["ada", "bela", "chidi", "dora", "emre", "fay"]
unpaid = rng.choice(names)
with open("orders.csv", "w") as file:
    file.write("order,customer,cents,status\n")
    for order in range(1, 61):
        name = rng.choice(names)
        status = rng.choice(["open", "refunded"] if name == unpaid else ["paid", "paid", "open", "refunded", "unpaid"])
        file.write(f"{order},{name},{rng.randint(100, 99999)},{status}\n")
