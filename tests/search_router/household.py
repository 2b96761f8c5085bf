"""A pool of three small agents on disk, in which some queries look meant for one agent and are answered by another."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from routewright.config import Profile, load_profile
from routewright.pools.pool import SPLITS
from routewright.search_router.examples import Example, read_examples
from routewright.search_router.features import Featurizer
from routewright.search_router.words import BUCKETS, document_frequencies

ADJECTIVES = ["red", "small", "heavy", "broken", "plastic", "antique"]
# What each agent's documents are about; `MISLEADING` things are on another agent's card than where their documents are.
THINGS = {
    "kitchen": ["oven", "pan", "dough", "whisk", "skillet", "sauce", "recipe", "flour", "grater", "stew"],
    "garden": ["seed", "soil", "hedge", "compost", "rose", "lawn", "spade", "tulip", "mulch", "rake"],
    "office": ["printer", "stapler", "envelope", "copier", "memo", "desk", "kettle", "teapot", "hose", "bucket"],
}
MISLEADING = {"kettle": "kitchen", "teapot": "kitchen", "hose": "garden", "bucket": "garden"}
CARDS = {
    "kitchen": "Cooking and baking: oven, pan, dough, whisk, skillet, sauce, recipe, flour, grater, stew, kettle, teapot.",
    "garden": "Plants and garden work: seed, soil, hedge, compost, rose, lawn, spade, tulip, mulch, rake, hose, bucket.",
    "office": "Paper and office machines: printer, stapler, envelope, copier, memo, desk.",
}
VERBS = ["repair", "clean", "store", "buy", "replace", "move", "label", "sell"]


def documents(name: str) -> list[dict[str, Any]]:
    """Sixty documents, one for each adjective and thing; those of the kitchen carry a year."""
    rows = []
    for i, thing in enumerate(THINGS[name]):
        for j, adjective in enumerate(ADJECTIVES):
            row: dict[str, Any] = {
                "_id": f"{thing}-{adjective}",
                "title": f"The {adjective} {thing}",
                "text": f"What there is to know about one {adjective} {thing}, volume {i}. It stands here and lasts long.",
            }
            if name == "kitchen":
                row["metadata"] = {"date": str(2018 + j)}
            rows.append(row)
    return rows


def queries(name: str) -> list[dict[str, Any]]:
    """One query a document; those for the kitchen's last three years say so, a reference date is always given."""
    rng = random.Random(name)
    rows = []
    for i, document in enumerate(documents(name)):
        thing, adjective = document["_id"].split("-")
        text = f"{rng.choice(VERBS)} the {adjective} {thing}"
        year = int((document.get("metadata") or {"date": "0"})["date"])
        if year > 2020:
            text += f" since {year}"
        rows.append({"_id": f"q{i}", "text": text, "metadata": {"reference_date": "2025-06-15"}})
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_household(folder: Path, splits: tuple[str, ...] = ("train", "dev", "test"), with_queries: bool = True) -> Path:
    """Write corpora, queries and qrels (of every six queries four train, one dev, one test); returns the pool file."""
    folder.mkdir(parents=True, exist_ok=True)
    agents = []
    for name, card in CARDS.items():
        rows, asked = documents(name), queries(name)
        write_lines(folder / f"{name}.jsonl", rows)
        agent: dict[str, Any] = {"name": name, "card": card, "search": {"kind": "bm25", "corpus": f"{name}.jsonl"}}
        if with_queries:
            write_lines(folder / f"{name}-queries.jsonl", asked)
            qrels = {}
            # the held-out sixths move on by one from thing to thing, so that every split has every adjective
            split_of = ["dev", "test", "train", "train", "train", "train"]
            for split in splits:
                lines = [
                    f"{asked[i]['_id']}\t{rows[i]['_id']}\t1\n"
                    for i in range(len(rows))
                    if split_of[(i + i // 6) % 6] == split
                ]
                (folder / f"{name}-{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
                qrels[split] = f"{name}-{split}.tsv"
            agent["queries"] = {"file": f"{name}-queries.jsonl", "qrels": qrels}
        agents.append(agent)
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump({"name": "household", "fallback": "office", "agents": agents}, sort_keys=False))
    return path


def profile_with(**sections: dict[str, Any]) -> Profile:
    """The smoke profile with some settings changed, by section."""
    smoke = load_profile("smoke")
    changes = {name: getattr(smoke, name).model_copy(update=values) for name, values in sections.items()}
    return smoke.model_copy(update=changes)


def featurizer_of(tokenizer: Any, texts: list[str], cards: dict[str, str]) -> Featurizer:
    """A featurizer whose IDF is that of these texts and that believes nothing about collections."""
    beliefs = np.zeros((BUCKETS, len(cards)), dtype=np.float32)
    return Featurizer(tokenizer, document_frequencies(texts), beliefs, cards)


def read_splits(folder: Path) -> dict[str, list[Example]]:
    """The examples of a finished `synthesize` folder."""
    return {split: read_examples(folder / f"{split}.jsonl") for split in SPLITS}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
