"""Make a draft head: generate chats with the model, train, measure on chats and on benchmarks/prompts.toml.

Everything is bounded in seconds; the file is there early in the training, and again whenever the head got better.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.head.batch import Batch, moved
from benchmarks.head.corpus import Chats, Corpus, Template, batches, joined, tokenizer_of
from benchmarks.head.network import Network, Shape
from benchmarks.head.training import Base, acceptance, coverage, most_frequent, told, trained, watched
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.headfile import fingerprint
from decode_daemon.engine.weights import Weights, load_weights

_ANSWER_TOKENS = 128  # of the prompts in benchmarks/prompts.toml, as in `anchorleg bench engine`
_SHOWN = 3  # chats that are printed
_SIZES = (4096, 6144, 8192, 12288, 16384, 24576)


def main() -> int:
    """Make the head; returns 0."""
    options = _parsed(sys.argv[1:])
    began = perf_counter()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(options.seed)
    config = LlamaConfig.read(options.model_dir)
    loaded = load_weights(options.model_dir, config, torch.bfloat16)
    model, weights = fingerprint(loaded), moved(loaded, device)
    template = Template.read(options.model_dir)
    print(f"model {model} on {device} after {perf_counter() - began:.1f} s", flush=True)

    batch = Batch(config, weights, options.rows, options.length)
    chats = Chats(batch, template, options.rows, options.length, options.seed)
    corpus = joined(list(batches(chats, options.generate_s, options.tokens, options.greedy)))
    held = Batch(config, weights, options.held, options.length)
    aside = Chats(held, template, options.held, options.length, options.seed + 1).generate(1.0, lambda: False)
    aside = aside.of(_unseen(aside, corpus, template))
    del chats, batch, held
    prompts = {kind: answered(config, weights, template, options.model_dir, texts) for kind, texts in _prompts().items()}
    print(f"{len(corpus.chats):,} chats, {len(aside.chats):,} held out; {perf_counter() - began:.0f} s", flush=True)

    for chat in corpus.chats[:_SHOWN].tolist():
        print(repr(tokenizer_of(options.model_dir).decode(chat)), flush=True)
    for size in (size for size in _SIZES if size < config.vocab_size):
        covered = coverage(aside, most_frequent(corpus, config.vocab_size, size), config.vocab_size)
        print(f"{size} ids are {covered:.2%} of held-out answers", flush=True)
    base = Base.of(config, weights, most_frequent(corpus, config.vocab_size, min(options.vocab, config.vocab_size)))
    for shape in options.shapes:
        out = (
            options.out if len(options.shapes) == 1 else options.out.with_stem(f"{options.out.stem}-{shape}".replace(",", "-"))
        )
        network = Network(config.hidden, shape, config.rms_eps).to(device)
        steps = trained(
            network, base, corpus, seconds=options.train_s, unroll=options.unroll, batch=options.batch, seed=options.seed
        )
        make(network, base, steps, aside, prompts, model, out, options.measured)
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; {perf_counter() - began:.0f} s", flush=True)
    return 0


def make(
    network: Network,
    base: Base,
    steps: Iterator[tuple[float, torch.Tensor]],
    aside: Corpus,
    prompts: Mapping[str, Corpus],
    model: str,
    out: Path,
    measured: int,
) -> None:
    """Train `network` by `steps`, write what was best to `out`, and print how often it is right.

    `measured`: positions of the held-out chats `aside` that are looked at on the way; at the end all of them are.
    """
    best: dict[str, torch.Tensor] = {}

    def keep(rates: list[float]) -> None:
        best.update({name: tensor.detach().clone() for name, tensor in network.state_dict().items()})
        network.file(model, base.ids, rates).save(out)

    print(f"a head of shape {network.shape}, {sum(part.numel() for part in network.parameters()) / 1e6:.1f} M", flush=True)
    watched(steps, lambda: acceptance(network, base, aside, measured), keep)
    network.load_state_dict(best)
    rates = acceptance(network, base, aside)
    network.file(model, base.ids, rates).save(out)
    print(f"held-out chats: {told(rates)}")
    for kind, answers in prompts.items():
        print(f"{kind}: {told(acceptance(network, base, answers))}", flush=True)


def answered(config: LlamaConfig, weights: Weights, template: Template, model_dir: Path, texts: Sequence[str]) -> Corpus:
    """Return greedy answers to `texts`."""
    prompts = [template.prompt(model_dir, text) for text in texts]
    length = max(map(len, prompts)) + _ANSWER_TOKENS
    chats = Chats(Batch(config, weights, len(prompts), length), template, len(prompts), length, seed=0)
    return chats.answers(prompts, _ANSWER_TOKENS)


def _prompts() -> dict[str, list[str]]:
    table: dict[str, list[str]] = tomllib.loads(files("benchmarks").joinpath("prompts.toml").read_text(encoding="utf-8"))
    return table


def _unseen(aside: Corpus, corpus: Corpus, template: Template) -> torch.Tensor:
    """Tell which chats of `aside` begin with a message that no chat of `corpus` begins with."""

    def message(chat: list[int]) -> tuple[int, ...]:
        rest = chat[len(template.opening) :]
        return tuple(rest[: rest.index(template.to_answer[0])] if template.to_answer[0] in rest else rest)

    known = {message(chat) for chat in corpus.chats.tolist()}
    return torch.tensor([message(chat) not in known for chat in aside.chats.tolist()], device=aside.ids.device)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="the head's file")
    parser.add_argument("--device", help="cuda where there is a GPU, else cpu")
    parser.add_argument("--generate-s", type=float, default=60.0, help="seconds for generating")
    parser.add_argument("--train-s", type=float, default=150.0, help="seconds for training, of each shape")
    parser.add_argument("--tokens", type=int, default=12_000_000, help="positions that are enough; 1.2 kB of memory each")
    parser.add_argument("--rows", type=int, default=2048, help="chats that are generated together")
    parser.add_argument("--held", type=int, default=512, help="chats that are held out")
    parser.add_argument("--length", type=int, default=448, help="tokens of a chat")
    parser.add_argument("--greedy", type=float, default=0.7, help="share of chats with greedy answers")
    parser.add_argument("--vocab", type=int, default=8192, help="ids that the head can draft")
    parser.add_argument(
        "--shapes",
        type=Shape.parse,
        nargs="+",
        default=[Shape(2, 2, 1536, 1)],
        help="of the head: states and tokens that it sees, inner size, blocks (2,2,1536,1); several are trained in turn",
    )
    parser.add_argument("--unroll", type=int, default=5, help="drafted tokens in a row that are trained")
    parser.add_argument("--batch", type=int, default=8192, help="positions of a training step")
    parser.add_argument("--measured", type=int, default=16384, help="held-out positions that are looked at while training")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
