"""The validator that rule files, rule tests and accepted alerts share."""

from __future__ import annotations

from healthcheck.rulelang.document import Document
from healthcheck.rulelang.loader import load_text
from healthcheck.rulelang.validation import Format, Validator

PERSON = {
    "type": "object",
    "required": ["version", "name"],
    "additionalProperties": False,
    "properties": {
        "version": {"enum": [1]},
        "name": {"type": "string", "errorMessage": ["a name is text", "write name: Ada"]},
        "age": {"type": "integer", "minimum": 0, "errorMessage": {"minimum": "nobody is that young"}},
        "friends": {"type": "array", "items": {"$ref": "#/definitions/friend"}},
    },
    "definitions": {
        "friend": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "friends": {"items": {"$ref": "#/definitions/friend"}}},
            "errorMessage": {"required": {"name": "a friend has a name"}},
        }
    },
}


def mistakes(text: str) -> list[str]:
    document = load_text(text, shown="f")
    return [str(p).removeprefix("f:") for p in document.problems + Validator(Format(PERSON)).check(document)]


def test_the_words_of_the_schema_are_used_and_what_to_write_stands_apart() -> None:
    assert mistakes("version: 1\nname: 3\nage: -1\n") == [
        "2:7: error[bad-value]: a name is text; found the number 3 (write name: Ada)",
        "3:6: error[bad-value]: nobody is that young; found -1",
    ]


def test_a_misspelt_key_is_not_missing_as_well_and_what_is_in_it_is_looked_at() -> None:
    assert mistakes("version: 1\nnaem: 3\n") == [
        '2:1: error[unknown-key]: unknown key "naem" (did you mean "name"?)',
        "2:7: error[bad-value]: a name is text; found the number 3 (write name: Ada)",
    ]


def test_a_misspelt_key_beside_the_right_one_leaves_the_right_one_alone() -> None:
    document = load_text("version: 1\nname: Ada\nnaem: 3\n")
    (problem,) = Validator(Format(PERSON)).check(document)
    assert problem.slug == "unknown-key"
    assert document.data["name"] == "Ada"


def test_all_missing_keys_of_one_map_are_named() -> None:
    assert [line.split(": ")[2] for line in mistakes("age: 3\n")] == [
        "the file does not say `version",
        "`name` is missing here",
    ]


def test_a_definition_may_refer_to_itself() -> None:
    text = "version: 1\nname: a\nfriends: [{name: b, friends: [{name: c, friends: [{nam: d}]}]}]\n"
    assert mistakes(text) == ["3:51: error[missing-key]: a friend has a name"]


def test_what_was_refused_is_known_with_all_that_holds_it() -> None:
    document = load_text("version: 1\nname: a\nfriends: [{name: b}, {name: 5}]\n")
    shape = Validator(Format(PERSON))
    assert len(shape.check(document)) == 1
    assert shape.is_bad(document, ("friends", 1, "name"))
    assert shape.is_bad(document, ("friends",))
    assert not shape.is_bad(document, ("friends", 0))
    assert not shape.is_bad(document, ("name",))


def test_a_file_that_fits_is_not_looked_at_again_and_one_that_does_not_is() -> None:
    assert [mistakes("version: 1\nname: b\n") for _ in range(2)] == [[], []]
    assert [len(mistakes("version: 1\n")) for _ in range(2)] == [1, 1]


def test_a_dict_is_checked_too_and_its_mistakes_name_the_key_path() -> None:
    (problem,) = Validator(Format(PERSON)).check(Document("people", data={"version": 1, "name": 3}))
    assert str(problem).startswith("people: name: error[bad-value]: a name is text")
