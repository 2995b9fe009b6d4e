"""The forms a grammar may be asked for in, and what each is to xgrammar, as vLLM 0.32 hands it over.

xgrammar takes seconds to import (it brings transformers along): nothing here does so before a grammar is parsed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decode_daemon.grammar.errors import GrammarUnsupported, reason_of
from decode_daemon.grammar.schema import DEEPEST, DEEPEST_TAG, deeper_than, unenforced
from handoff import decode_pb2 as pb

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, StructuralTagItem

_ANY_OBJECT = '{"type": "object"}'

# Of a literal in xgrammar's EBNF: what ends one, and what a line of text cannot hold.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)} | {
    ord(character): escape for character, escape in {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}.items()
}


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must match. Equal forms are the same grammar."""

    kind: int  # of pb.Grammar.Kind
    source: str

    @classmethod
    def of(cls, grammar: pb.Grammar) -> "Form":
        """Return a request's grammar."""
        return cls(grammar.kind, grammar.source)

    def parse(self) -> None:
        """Raise GrammarUnsupported, saying why, for what vLLM would not compile with xgrammar.

        Takes milliseconds for what people write, and may take seconds for a megabyte of it.
        """
        parse = _PARSERS.get(self.kind)
        if parse is None:
            raise GrammarUnsupported(f"grammars of kind {self.kind} are not known here: this daemon is older than its gateway")
        try:
            parse(self.source)
        except GrammarUnsupported:
            raise
        except Exception as error:  # RuntimeError, ValueError, KeyError: whatever the library and the reading of JSON raise
            raise GrammarUnsupported(f"xgrammar does not take this grammar: {reason_of(error)}") from error

    def compile(self, compiler: "GrammarCompiler") -> "CompiledGrammar":
        """Return the grammar over the compiler's vocabulary. Expects a form that `parse` has nothing against."""
        match self.kind:
            case pb.Grammar.JSON_SCHEMA:
                return compiler.compile_json_schema(self.source, any_whitespace=True)
            case pb.Grammar.JSON_OBJECT:
                return compiler.compile_json_schema(_ANY_OBJECT, any_whitespace=True)
            case pb.Grammar.REGEX:
                return compiler.compile_regex(self.source)
            case pb.Grammar.CHOICE:
                return compiler.compile_grammar(choice_ebnf(json.loads(self.source)))
            case pb.Grammar.EBNF if is_lark(self.source):
                return compiler.compile_lark(self.source)
            case pb.Grammar.EBNF:
                return compiler.compile_grammar(self.source)
            case _:
                tag = json.loads(self.source)
                if "structures" in tag:
                    return compiler.compile_structural_tag(_items(tag), tag["triggers"])
                return compiler.compile_structural_tag(self.source)


def is_lark(source: str) -> bool:
    """Tell Lark from EBNF, as vLLM does: no line, comments left aside, defines a rule with "::="."""
    return not any("::=" in line.split("#", 1)[0].split("//", 1)[0] for line in source.split("\n"))


def choice_ebnf(choices: list[str]) -> str:
    """Return a grammar of exactly these texts."""
    return "root ::= " + " | ".join(f'"{choice.translate(_ESCAPES)}"' for choice in choices)


def _parse_schema(source: str) -> None:
    from xgrammar import Grammar

    schema = _json(source, DEEPEST)
    if (found := unenforced(schema)) is not None:
        raise GrammarUnsupported(f"xgrammar does not hold an answer to this JSON schema: {found}")
    Grammar.from_json_schema(schema)


def _parse_object(source: str) -> None:
    """Any JSON object: nothing to find fault with."""


def _parse_regex(source: str) -> None:
    from xgrammar import Grammar

    if "\x00" in source:
        raise GrammarUnsupported("a regular expression must not contain the character U+0000")
    Grammar.from_regex(source)


def _parse_choice(source: str) -> None:
    from xgrammar import Grammar

    choices = _json(source, DEEPEST)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarUnsupported("a choice must be a JSON list of at least one string")
    Grammar.from_ebnf(choice_ebnf(choices))


def _parse_ebnf(source: str) -> None:
    from xgrammar import Grammar

    if not source.strip():
        raise GrammarUnsupported("a grammar must not be empty")
    if is_lark(source):
        Grammar.from_lark(source)
    else:
        Grammar.from_ebnf(source)


def _parse_tag(source: str) -> None:
    from xgrammar import Grammar

    tag = _json(source, DEEPEST_TAG)
    if "structures" in tag:
        Grammar.from_structural_tag(_items(tag), tag["triggers"])
    else:
        Grammar.from_structural_tag(source)


_PARSERS: Mapping[int, Callable[[str], None]] = {
    pb.Grammar.JSON_SCHEMA: _parse_schema,
    pb.Grammar.JSON_OBJECT: _parse_object,
    pb.Grammar.REGEX: _parse_regex,
    pb.Grammar.CHOICE: _parse_choice,
    pb.Grammar.EBNF: _parse_ebnf,
    pb.Grammar.STRUCTURAL_TAG: _parse_tag,
}


def _items(tag: Mapping[str, Any]) -> "list[StructuralTagItem]":
    """Return the tags of the older form."""
    from xgrammar import StructuralTagItem

    return [
        StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"]) for one in tag["structures"]
    ]


def _json(source: str, deepest: int) -> Any:
    try:
        value = json.loads(source)
    except RecursionError:
        raise GrammarUnsupported(f"JSON may nest at most {deepest} levels of objects and lists") from None
    if deeper_than(deepest, value):
        raise GrammarUnsupported(f"JSON may nest at most {deepest} levels of objects and lists")
    return value
