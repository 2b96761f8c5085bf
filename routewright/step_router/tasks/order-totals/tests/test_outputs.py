import csv
from pathlib import Path


def test_totals():
    sums = {}
    with open(ORIGINAL / "orders.csv") as file:
        for row in csv.DictReader(file):
            if row["status"] == "paid":
                sums[row["customer"]] = sums.get(row["customer"], 0) + int(row["cents"])
    expected = ["customer,cents", *(f"{name},{cents}" for name, cents in sorted(sums.items()))]
    assert Path("totals.csv").read_text().split() == expected


def test_orders_are_unchanged():
    assert Path("orders.csv").read_bytes() == (ORIGINAL / "orders.csv").read_bytes()
