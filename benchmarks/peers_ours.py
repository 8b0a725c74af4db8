"""This project for benchmarks/peers.py: `eogp index` as anyone would run it, queries through the engine that the server uses; and the uncompressed EK-FAC
reference that fidelity is measured against."""

from __future__ import annotations

import argparse
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers_common as common

from engine.curvature import Curvature
from engine.example import Example
from engine.fit_curvature import fit_curvature
from engine.model import LoadedModel, load_model
from engine.modules import track
from engine.query import QueryEngine, QueryInput, QuerySpec
from engine.query.spec import Limits
from engine.settings import FitSettings, ModelSettings
from engine.uncompressed import UncompressedInfluence
from indexer.index import index as build
from indexer.reporter import Reporter
from indexer.settings import IndexSettings

LIMITS = Limits(queries=max(common.COUNTS), top_k=100_000)


def index(args: argparse.Namespace) -> dict[str, Any]:
    store = args.out / "store"
    shutil.rmtree(store, ignore_errors=True)
    given: dict[str, Any] = {"bytes_per_example": args.bytes}
    if args.projection_bytes:
        given["projection_bytes"] = args.projection_bytes
    settings = IndexSettings(
        model=str(args.work / "model"),
        data=[str(args.work / "train.jsonl")],
        kind="text",
        append_eos=False,
        device="cpu",
        threads=1,
        keep_curvature=False,
        **given,
    )
    seconds = common.timed(lambda: build(store, settings, Reporter(log_json=True)))
    engine = QueryEngine.open(store)
    return {
        "seconds": seconds,
        "bytes_per_example": engine.store.manifest.sketch.bytes_per_example,
        "shared_bytes": common.folder_bytes(store / "shared" / "sketch"),
    }


def ask(engine: QueryEngine, texts: list[str], top_k: int) -> Any:
    spec = QuerySpec(tuple(QueryInput(text=t) for t in texts), top_k=top_k, direction="both" if top_k > 1000 else "proponents")
    (answer,) = engine.answer([spec])
    return answer


def queries(args: argparse.Namespace) -> dict[str, Any]:
    texts = common.texts(args.work, common.QUERIES)
    engine = QueryEngine.open(args.out / "store", limits=LIMITS)
    ask(engine, texts[-2:], 10)
    return {"seconds": {str(n): common.timed(partial(ask, engine, texts[:n], 10)) for n in common.COUNTS}}


def scores(args: argparse.Namespace) -> dict[str, Any]:
    engine = QueryEngine.open(args.out / "store", limits=LIMITS)
    number = {f"train-{i}": i for i in range(engine.store.n_rows)}
    texts = common.texts(args.work, "query")
    values = np.zeros((len(texts), len(number)), np.float32)
    for q, answer in enumerate(ask(engine, texts, len(number)).answers):
        for hit in [*(answer.proponents or []), *(answer.opponents or [])]:
            values[q, number[hit.id]] = hit.score
    np.save(args.out / "scores.npy", values)
    return {}


def examples(loaded: LoadedModel, work: Path, split: str) -> list[Example]:
    found = []
    for i, ids in enumerate(common.token_ids(work, split)):
        array = ids.numpy()
        found.append(Example(f"{split}-{i}", array, array, np.arange(len(array)) > 0, ""))
    return found


def exact(args: argparse.Namespace) -> tuple[LoadedModel, list[Example]]:
    loaded = load_model(ModelSettings(model=str(args.work / "model"), device="cpu"))
    return loaded, examples(loaded, args.work, "train")


def fit_exact(args: argparse.Namespace) -> dict[str, Any]:
    loaded, train = exact(args)
    found: list[Curvature] = []
    seconds = common.timed(lambda: found.append(fit_curvature(loaded, track(loaded).tracked, train, range(len(train)), FitSettings())))
    found[0].save(args.out / "curvature")
    return {"seconds": seconds, "bytes_per_example": 0, "shared_bytes": common.folder_bytes(args.out / "curvature")}


def queries_exact(args: argparse.Namespace) -> dict[str, Any]:
    loaded, train = exact(args)
    influence = UncompressedInfluence(loaded, Curvature.load(args.out / "curvature"))
    asked = examples(loaded, args.work, common.QUERIES)
    return {"seconds": {str(n): common.timed(partial(influence.scores, asked[:n], train)) for n in common.COUNTS}}


def scores_exact(args: argparse.Namespace) -> dict[str, Any]:
    loaded, train = exact(args)
    influence = UncompressedInfluence(loaded, Curvature.load(args.out / "curvature"))
    np.save(args.out / "scores.npy", influence.scores(examples(loaded, args.work, "query"), train))
    return {}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--projection-bytes")


if __name__ == "__main__":
    common.run_worker(
        {"index": index, "queries": queries, "scores": scores, "exact-index": fit_exact, "exact-queries": queries_exact, "exact-scores": scores_exact}, options
    )
