"""A conversion is complete and right, or goes on where it was interrupted, or has written nothing."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import grpc.aio
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from cli.convert import LOCK_FILE, ConvertError, Wanted, locked, run
from cli.convert_view import Shown
from decode_daemon.daemon import running
from decode_daemon.engine.checkpoint import expected_shapes
from decode_daemon.engine.config import LlamaConfig, parse_config
from decode_daemon.engine.fused import Record, read_record, room, write_part
from decode_daemon.engine.weights import load_weights
from handoff.decode_pb2_grpc import DecoderStub
from handoff.identity import model_digest
from handoff.messages import ModelIdentity
from leases import LeaseTable
from tests.kit.daemon import CONTEXT, LAYOUT, NAME, DaemonLane, reference_of, settings
from tests.kit.handoff import prefill
from tests.kit.valkey import ValkeyProcess

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FILES = 5  # the embedding, three layers, and what follows them


def model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    folder.mkdir()
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(parse_config(config))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model(tmp_path / "source")


def convert(model_dir: Path, save_dir: Path, **options: Any) -> None:
    run(Wanted(model_dir=model_dir, save_dir=save_dir, **options), Console(quiet=True))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def anchorleg(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def script(text: str, *arguments: object, inside: Sequence[str] = ()) -> list[str]:
    """Run Python code that finds `source`, `target` (the first arguments) and `convert`; return the lines it prints."""
    ready = """
        import os, resource, signal, sys
        from pathlib import Path
        from rich.console import Console
        from cli.convert import ConvertError, Wanted, run
        source, target = map(Path, sys.argv[1:3])
        def convert():
            run(Wanted(model_dir=source, save_dir=target), Console(quiet=True))
    """
    command = [*inside, sys.executable, "-c", dedent(ready) + dedent(text), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


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


def test_a_second_run_keeps_every_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    convert(source, target)
    before = {path: path.stat().st_ino for path in target.iterdir()}
    convert(source, target)
    assert {path: path.stat().st_ino for path in target.iterdir()} == before


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


def test_a_run_that_is_killed_at_any_byte_is_taken_up_by_the_next(source: Path, tmp_path: Path) -> None:
    """The kernel kills at the first byte beyond a file size limit, which is raised from run to run."""
    wanted, target = tmp_path / "wanted", tmp_path / "fused"
    convert(source, wanted)
    sizes = {path.stat().st_size for path in wanted.iterdir()}
    limits = sorted(size - less for size in sizes for less in (1, 1000) if size > 1500)
    steps = script(
        """
        for limit in [0, 1, 100, 500, *map(int, sys.argv[3:])]:
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                convert()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ, (limit, status)
            print(len(list(target.glob("fused-*.safetensors"))))
        """,
        source,
        target,
        *limits,
    )
    assert steps[0] == "0"
    assert steps[-1] not in ("0", str(FILES))
    assert steps == sorted(steps)
    assert not read_record(target).complete
    convert(source, target)
    assert contents(target) == contents(wanted)


def test_a_disk_that_is_full_ends_the_run_by_name_and_keeps_what_is_complete(source: Path, tmp_path: Path) -> None:
    """A file system without inodes is full before its bytes are; when it gets some, the same command goes on."""
    told, kept, after = script(
        """
        target.mkdir()
        assert os.system(f"mount -t tmpfs -o size=80m,nr_inodes=8 tmpfs {target}") == 0
        try:
            convert()
        except ConvertError as error:
            print(error)
        kept = {path.name: path.stat().st_ino for path in target.glob("fused-*.safetensors")}
        print(sorted(kept), list(target.glob(".*")))
        assert os.system(f"mount -o remount,nr_inodes=100 {target}") == 0
        convert()
        after = {path.name: path.stat().st_ino for path in target.glob("fused-*.safetensors")}
        print(len(after), after.items() >= kept.items())
        """,
        source,
        tmp_path / "fused",
        inside=("unshare", "--mount", "--map-root-user"),
    )
    assert told.startswith(str(tmp_path / "fused"))
    assert "No space left on device. What is complete is kept" in told
    assert kept == "['fused-embedding.safetensors', 'fused-head.safetensors'] []"
    assert after == f"{FILES} True"


def test_a_disk_without_room_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    told, left = script(
        """
        target.parent.mkdir()
        assert os.system(f"mount -t tmpfs -o size=1m tmpfs {target.parent}") == 0
        try:
            convert()
        except ConvertError as error:
            print(error)
        print(list(target.parent.iterdir()))
        """,
        source,
        tmp_path / "disk" / "fused",
        inside=("unshare", "--mount", "--map-root-user"),
    )
    assert f"the fused form needs 0.07 GB in {tmp_path / 'disk' / 'fused'}, where 0.00 GB are free: make room" in told
    assert left == "[]"


def test_only_what_is_still_to_be_written_needs_room(source: Path, tmp_path: Path) -> None:
    fits = script(
        """
        target.mkdir()
        assert os.system(f"mount -t tmpfs -o size=80m tmpfs {target}") == 0
        convert()
        free, spare = os.statvfs(target).f_bavail * os.statvfs(target).f_bsize, (64 << 20) + 20_000
        (target / ".anchorleg-filler").write_bytes(bytes(free - spare))
        (target / "fused-head.safetensors").unlink()
        convert()
        print(spare > sum(path.stat().st_size for path in target.glob("fused-*")) + (64 << 20))
        """,
        source,
        tmp_path / "fused",
        inside=("unshare", "--mount", "--map-root-user"),
    )
    assert fits == ["False"]


def test_what_replaces_another_file_needs_room_beside_it(tmp_path: Path) -> None:
    for name, size in {"smaller": 10, "same": 50, "larger": 100}.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert room(tmp_path, {"new": 500}) == 500
    assert room(tmp_path, {"same": 50}) == 50
    assert room(tmp_path, {"new": 500, "smaller": 50, "same": 50, "larger": 60}) == 500 + 40 + 60


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [damage, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.write_bytes(b"{")],
    ids=["one bit", "gone", "cut short", "no safetensors"],
)
def test_a_damaged_file_is_found_and_written_again(source: Path, tmp_path: Path, harm: Callable[[Path], object]) -> None:
    target = tmp_path / "fused"
    convert(source, target)
    wanted = contents(target)
    harm(target / "fused-layer-1.safetensors")
    convert(source, target)
    assert contents(target) == wanted


@pytest.mark.parametrize(
    "harm",
    [
        lambda source, target: (target / "tokenizer.json").unlink(),
        lambda source, target: (target / "config.json").write_text("{}"),
        lambda source, target: (target / "chat_template.jinja").touch(),
        lambda source, target: (source / "generation_config.json").write_text('{"temperature": 0.7}'),
        lambda source, target: (source / "generation_config.json").unlink(),
        lambda source, target: (source / "chat_template.jinja").write_text("{{ messages }}"),
    ],
    ids=["gone", "edited", "one too many", "changed in the source", "gone in the source", "new in the source"],
)
def test_what_lies_beside_the_weights_is_made_the_sources_again(
    source: Path, tmp_path: Path, harm: Callable[[Path, Path], object]
) -> None:
    target, wanted = tmp_path / "fused", tmp_path / "wanted"
    convert(source, target)
    weights = {path: path.stat().st_ino for path in target.glob("fused-*")}
    harm(source, target)
    convert(source, target)
    convert(source, wanted)
    assert contents(target) == contents(wanted)
    assert {path: path.stat().st_ino for path in target.glob("fused-*")} == weights


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_source_that_changes_while_it_is_read_leaves_nothing_a_daemon_takes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def write_and_change(*arguments: Any) -> None:
        write_part(*arguments)
        os.utime(source / file, ns=(0, 0))

    target = tmp_path / "fused"
    monkeypatch.setattr("cli.convert.write_part", write_and_change)
    with pytest.raises(ConvertError, match=f"{source} changed while it was read"):
        convert(source, target)
    assert not read_record(target).complete
    assert list(target.glob("fused-*")) == []
    monkeypatch.undo()
    convert(source, target)
    assert read_record(target).complete


def test_another_model_does_not_take_the_folder_unless_told_to(source: Path, tmp_path: Path) -> None:
    other, target, wanted = model(tmp_path / "other", seed=1, num_hidden_layers=2), tmp_path / "fused", tmp_path / "wanted"
    (source / "merges.txt").write_text("a b")
    convert(source, target)
    (target / "notes.txt").write_text("mine")
    before = contents(target)
    with pytest.raises(ConvertError) as refused:
        convert(other, target)
    assert str(refused.value) == (
        f"{target} holds {source} (identity {model_digest(source)}), not {other} (identity {model_digest(other)}): "
        "choose another --save-dir, or say --overwrite"
    )
    assert contents(target) == before
    convert(other, target, overwrite=True)
    convert(other, wanted)
    assert contents(target) == contents(wanted) | {"notes.txt": b"mine"}


def test_a_half_overwritten_folder_is_the_new_models_and_goes_on_as_such(source: Path, tmp_path: Path) -> None:
    other, target, wanted = model(tmp_path / "other", seed=1), tmp_path / "fused", tmp_path / "wanted"
    convert(source, target)
    convert(other, wanted)
    # What a run leaves that was killed after its first file.
    Record(**json.loads((wanted / "anchorleg.json").read_text()) | {"complete": False}).write(target)
    shutil.copy(wanted / "fused-embedding.safetensors", target)
    with pytest.raises(ConvertError, match=f"holds {other} "):
        convert(source, target)
    convert(other, target)
    assert contents(target) == contents(wanted)


def test_rounded_weights_are_another_conversion_of_the_same_model(tmp_path: Path) -> None:
    source, target = model(tmp_path / "float32", dtype=torch.float32), tmp_path / "fused"
    convert(source, target)
    with pytest.raises(ConvertError, match="rounded to bfloat16"):
        convert(source, target, rounded_to="bfloat16")
    convert(source, target, rounded_to="bfloat16", overwrite=True)
    assert load_file(target / "fused-layer-0.safetensors")["layers.0.down"].dtype == torch.bfloat16
    assert model_digest(target) == model_digest(source)


def test_a_model_of_bfloat16_is_not_rounded_by_storing_it_so(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "fused", rounded_to="bfloat16")
    assert read_record(tmp_path / "fused").rounded_to is None


def test_two_conversions_into_one_folder_refuse_each_other_by_name(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    target.mkdir()
    with locked(target):
        done = anchorleg("convert", "--model-dir", str(source), "--save-dir", str(target))
        assert done.returncode == 2
        assert f"process {os.getpid()} on " in done.stderr
        assert f"converts into {target} just now" in done.stderr
        assert [path.name for path in target.iterdir()] == [LOCK_FILE]
    convert(source, target)


def test_a_lock_and_what_else_a_killed_run_left_are_in_nobodys_way(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fused"
    target.mkdir()
    (target / LOCK_FILE).write_text("anchorleg convert, process 1 on nowhere,")
    (target / ".anchorleg.json.partial").touch()
    convert(source, target)
    assert list(target.glob(".*")) == []
    for name in ("tokenizer.json", "fused-layer-30.safetensors"):
        (target / f".{name}.partial").touch()
    (target / ".download.partial").touch()
    (target / ".merges.txt.partial").mkdir()
    convert(source, target)
    assert {path.name for path in target.glob(".*")} == {".download.partial", ".merges.txt.partial"}


def test_a_folder_with_files_of_others_is_left_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(ConvertError, match=r"holds thesis\.txt, which no conversion wrote"):
            convert(source, target, overwrite=overwrite)
    with pytest.raises(ConvertError, match=r"holds config\.json, which no conversion wrote"):
        convert(source, source)
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]


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
