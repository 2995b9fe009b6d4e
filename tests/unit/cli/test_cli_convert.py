"""A conversion is complete and right, or has written nothing."""

import json
import shutil
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from cli.convert import ConvertError
from cli.convert_view import Shown
from decode_daemon.daemon import running
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.fused import read_record
from decode_daemon.engine.weights import load_weights
from handoff.decode_pb2_grpc import DecoderStub
from handoff.identity import model_digest
from handoff.messages import ModelIdentity
from leases import LeaseTable
from tests.kit.converting import CONFIG, anchorleg, convert, model
from tests.kit.daemon import CONTEXT, LAYOUT, NAME, DaemonLane, reference_of, settings
from tests.kit.handoff import prefill
from tests.kit.valkey import ValkeyProcess


def test_the_folder_alone_holds_what_a_daemon_reads_and_tells_the_sources_identity(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    done = anchorleg("convert", "--model-dir", str(source), "--save-dir", str(target))
    assert done.returncode == 0, done.stderr
    identity = model_digest(source)
    assert model_digest(target) == identity
    assert done.stderr.splitlines()[0].startswith("1/5  fused-embedding.safetensors  0.0 MB  written")
    assert done.stderr.endswith(f"{target} serves a daemon as --model-dir; its identity is {identity}\n")
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert {path.name for path in target.glob(".*")} == set()
    shutil.rmtree(source)
    assert load_weights(target, LlamaConfig.read(target), torch.bfloat16).layers[2].qkv.shape == (128, 64)


@pytest.fixture
def quiet_connector() -> None:
    """The connector is imported, and the warnings that vLLM makes of its own are over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import connector  # noqa: F401


@pytest.mark.usefixtures("quiet_connector")
async def test_a_daemon_serves_the_folder_to_a_vllm_that_runs_on_the_source(tmp_path: Path) -> None:
    shape = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 16}
    source, target = model(tmp_path / "source", dtype=torch.float32, **shape), tmp_path / "fused"
    words = models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0")
    Tokenizer(words).save(str(source / "tokenizer.json"))
    convert(source, target)
    computed = reference_of(source)
    runs_on = ModelIdentity(NAME, model_digest(source), CONTEXT)
    caches = [cache.view(torch.uint8) for cache in computed.caches]
    with ValkeyProcess(tmp_path) as valkey:
        async with (
            LeaseTable(valkey.url) as table,
            running(settings(target, valkey)) as daemon,
            grpc.aio.insecure_channel(daemon.node.decode_endpoint) as channel,
        ):
            with prefill(layout=LAYOUT, caches=caches, model=runs_on) as worker:
                lane = DaemonLane(daemon, DecoderStub(channel), table, worker)
                grant, call = await lane.reserved()
                assert await lane.served(grant, call, computed) == computed.tokens


def test_the_same_model_gives_the_same_bytes_sharded_or_not(source: Path, tmp_path: Path) -> None:
    sharded = shutil.copytree(source, tmp_path / "sharded")
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    halves = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, sharded / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "one")
    convert(sharded, tmp_path / "two")
    one, two = (load_weights(tmp_path / name, LlamaConfig.read(source), torch.bfloat16) for name in ("one", "two"))
    assert torch.equal(one.layers[1].gate_up, two.layers[1].gate_up)
    assert model_digest(tmp_path / "two") == model_digest(sharded) != model_digest(source)
    assert not (tmp_path / "two" / "model.safetensors.index.json").exists()


def test_a_model_of_bfloat16_is_not_rounded_by_storing_it_so(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "fused", rounded_to="bfloat16")
    assert read_record(tmp_path / "fused").rounded_to is None


def change(fields: dict[str, Any]) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | fields))


def without(name: str) -> Callable[[Path], object]:
    def remove(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return remove


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            change({"architectures": ["GemmaForCausalLM"]}),
            r"config\.json: architectures is \['GemmaForCausalLM'\].*one of Llama",
        ),
        (change({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}), r"config\.json: sliding_window is 4096"),
        (change({"rope_scaling": {"rope_type": "longrope"}}), r"config\.json: rope_scaling\.rope_type is 'longrope'"),
        (
            change({"intermediate_size": 128}),
            r"model\.layers\.0\.mlp\.gate_proj\.weight is \[96, 64\], config\.json asks for \[128",
        ),
        (without("model.layers.2.mlp.up_proj.weight"), r"lacks tensor model\.layers\.2\.mlp\.up_proj\.weight"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    ],
    ids=["architecture", "sliding window", "rope", "shape", "tensor", "tokenizer", "config", "weights"],
)
def test_what_cannot_be_converted_is_refused_by_name_before_anything_is_written(
    source: Path, tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    harm(source)
    with pytest.raises(ConvertError, match=message):
        convert(source, tmp_path / "fused")
    assert not (tmp_path / "fused").exists()


def test_a_tensor_in_two_files_or_not_where_the_index_says_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    tensors, name = load_file(source / "model.safetensors"), "model.norm.weight"
    save_file({name: tensors[name]}, source / "more.safetensors")
    files = dict.fromkeys(tensors, "model.safetensors") | {"other": "more.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ConvertError, match=rf"{name} is in {source}/model\.safetensors and in {source}/more\.safetensors"):
        convert(source, tmp_path / "fused")
    save_file({"other": tensors[name]}, source / "more.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files | {name: "more.safetensors"}}))
    with pytest.raises(ConvertError, match=rf"{name} is in {source}/model\.safetensors, .* says more\.safetensors"):
        convert(source, tmp_path / "fused")


def test_a_place_without_a_model_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="nothing does not exist"):
        convert(tmp_path / "nothing", tmp_path / "fused")
    with pytest.raises(ConvertError, match=r"config\.json is no \.gguf file"):
        convert(source / "config.json", tmp_path / "fused")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConvertError, match=f"holds 2 GGUF files: name one, such as --model-dir {tmp_path / 'a.gguf'}"):
        convert(tmp_path, tmp_path / "fused")
    convert(source, tmp_path / "fused")
    with pytest.raises(ConvertError, match="is in the fused form already"):
        convert(tmp_path / "fused", tmp_path / "again")


def test_a_terminal_shows_a_bar_and_an_interrupted_run_says_how_far_it_came() -> None:
    text = StringIO()

    def interrupted() -> None:
        with Shown(Console(file=text, force_terminal=True, width=120), {"a": 1_000_000, "b": 3_000_000}) as shown:
            shown("a", "written")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "1.0/4.0 MB" in text.getvalue()
    assert "a written" in text.getvalue()
    assert text.getvalue().endswith("1 of 2 files are complete; the same command goes on from there\n")
