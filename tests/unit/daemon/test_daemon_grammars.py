"""What a daemon does with its requests' grammars: read, compiled once beside everything else, kept, and given up on."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from decode_daemon.grammar import Form, GrammarBusy, GrammarError, GrammarFailed, Grammars, GrammarUnsupported
from handoff import decode_pb2 as pb
from handoff.decode_pb2 import Grammar
from tests.kit.grammar import PERSON, HeldForm, grammars_of, held, ready, write_tokenizer
from tests.kit.handoff import comes_true

ANY_OBJECT = Form(Grammar.JSON_OBJECT, "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(here)
    return here


@pytest.fixture
async def grammars(folder: Path) -> Grammars:
    return await ready(folder)


async def test_a_grammar_that_several_ask_for_at_once_is_compiled_once_and_kept(folder: Path) -> None:
    compiled: list[float] = []
    grammars = await ready(folder, compiled=compiled.append)
    compiler = await grammars.ready()
    form = HeldForm(Grammar.JSON_SCHEMA, json.dumps(PERSON))
    with held():
        asking = [asyncio.create_task(grammars.constraint(form, [stop])) for stop in (3, 4)]
        await comes_true(lambda: len(grammars._compiling) == 1)
    first, second = await asyncio.gather(*asking)
    assert len(compiled) == 1
    kept = compiler.get_cache_size_bytes()
    assert kept > 0
    third = await grammars.constraint(form, [3])
    assert compiler.get_cache_size_bytes() == kept
    assert len({id(one) for one in (first, second, third)}) == 3  # a state of its own for each


async def test_a_grammar_that_takes_too_long_to_parse_is_refused_in_time(grammars: Grammars) -> None:
    with held():
        async with asyncio.timeout(0.9):
            with pytest.raises(GrammarBusy, match=r"not done with the grammar in 0\.5 s"):
                await grammars.check(HeldForm(Grammar.CHOICE, '["a"]'))


async def test_so_many_grammars_are_worked_on_at_a_time_and_no_more_until_one_is_done(grammars: Grammars) -> None:
    forms = [HeldForm(Grammar.CHOICE, f'["{number}"]') for number in range(4)]
    with held():
        waiting = [asyncio.create_task(grammars.constraint(form, [])) for form in forms]
        await comes_true(lambda: len(grammars._compiling) == 4)
        with pytest.raises(GrammarBusy, match="at work on 4 grammars"):
            await grammars.check(ANY_OBJECT)
        with pytest.raises(GrammarFailed, match="at work on 4 grammars"):
            await grammars.constraint(ANY_OBJECT, [])
        waiting.append(asyncio.create_task(grammars.constraint(forms[0], [])))  # needs no work of its own
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    await grammars.check(ANY_OBJECT)


async def test_who_stops_waiting_leaves_the_work_to_the_next(grammars: Grammars) -> None:
    form = HeldForm(Grammar.CHOICE, '["a"]')
    with held() as go:
        impatient = asyncio.create_task(grammars.constraint(form, []))
        await comes_true(lambda: len(grammars._compiling) == 1)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        patient = asyncio.create_task(grammars.constraint(form, []))
        go.set()
        assert (await patient).mask() is not None


async def test_the_event_loop_runs_on_while_a_grammar_is_compiled(grammars: Grammars) -> None:
    turns = 0
    words = json.dumps([f"choice number {number} of many" for number in range(3_000)])
    compiling = asyncio.create_task(grammars.constraint(Form(Grammar.CHOICE, words), []))
    while not compiling.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10


async def test_a_grammar_that_cannot_be_compiled_is_an_error_with_a_sentence(grammars: Grammars) -> None:
    with pytest.raises(GrammarFailed, match=r"^the grammar cannot be compiled: Regex parsing error") as error:
        await grammars.constraint(Form(Grammar.REGEX, "("), [])
    assert error.value.code == "grammar_failed"


async def test_until_the_tokenizer_is_read_grammars_are_refused(folder: Path) -> None:
    with pytest.raises(GrammarBusy, match="not begun"):
        await grammars_of(folder).check(ANY_OBJECT)


def unreadable(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def gone(folder: Path, tmp_path: Path) -> Path:
    return tmp_path


def mistral(folder: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    for name in ("tekken.json", "consolidated.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("made", "reason"),
    [(unreadable, "cannot be read for grammars"), (gone, "cannot be read for grammars"), (mistral, "mistral-common")],
)
async def test_a_tokenizer_that_cannot_be_read_refuses_every_grammar_and_only_the_log_tells_its_path(
    made: Any, reason: str, folder: Path, tmp_path: Path
) -> None:
    grammars = grammars_of(made(folder, tmp_path))
    with capture_logs() as logs:
        grammars.start()
        for _ in range(2):
            with pytest.raises(GrammarUnsupported, match=reason) as refusal:
                await grammars.ready()
            assert "/" not in str(refusal.value)
        with pytest.raises(GrammarError):
            await grammars.check(ANY_OBJECT)
    assert [(line["log_level"], line["model_dir"]) for line in logs] == [("warning", str(tmp_path))]


async def test_the_threads_are_free_again_after_each_kind_of_outcome(grammars: Grammars) -> None:
    for _ in range(10):
        await grammars.check(Form.of(pb.Grammar(kind=Grammar.REGEX, source="a")))
        with pytest.raises(GrammarUnsupported):
            await grammars.check(Form(Grammar.REGEX, "("))
        with pytest.raises(GrammarFailed):
            await grammars.constraint(Form(Grammar.REGEX, "("), [])
    await comes_true(lambda: not [one for one in threading.enumerate() if one.name == "grammar"])
