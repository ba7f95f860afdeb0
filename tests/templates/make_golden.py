#!/usr/bin/env python3
"""Renders every template of this folder with Hugging Face transformers and writes golden/*.json.

Read by the tests of crates/tokenizer/src/chat. The templates are our own texts, written from the public
descriptions of each format with the Jinja constructs that the models' own templates use; the words between
the markers are ours.

    python make_golden.py            needs transformers 5 and jinja2, no torch; writes golden/*.json
    python make_golden.py --check    compares with the files, writes nothing
    python make_golden.py --folder DIR
                                     renders the templates of DIR instead, with its families.json and
                                     the chats from here: for models' own templates, not kept here

families.json   special tokens by family; FAMILY.jinja is its template, FAMILY.NAME.jinja its template NAME
cases.json      chats as OpenAI's clients send them: arguments as JSON text, absent content as null
dialect.json    one-line templates that show what the Jinja dialect does, rendered over the case `plain`

A golden value is the text, or {"error": the message} where the template refuses. The clock stands at
2024-07-26 12:05 UTC.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils

HERE = Path(__file__).resolve().parent
# Templates that concatenate arguments as text, and ask for `content is none`. transformers leaves both to the
# caller; the engine finds out by trying.
TEXT_ARGUMENTS = {"deepseek_r1_distill"}
NONE_CONTENT = TEXT_ARGUMENTS


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 12, 5, 6)


chat_template_utils.datetime = Clock


def messages_for(family, messages):
    """What a caller of apply_chat_template would pass for this family."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            if family not in TEXT_ARGUMENTS:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if message["content"] is None and family not in NONE_CONTENT:
            message["content"] = ""
    return messages


def render(template, messages, special, case):
    kwargs = dict(case.get("kwargs", {}))
    kwargs.pop("chat_template", None)
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[messages],
            tools=case.get("tools"),
            chat_template=template,
            add_generation_prompt=case.get("add_generation_prompt", True),
            **{**special, **kwargs},
        )
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return {"error": str(error)}
    return texts[0]


def template_for(folder, family, case):
    name = case.get("kwargs", {}).get("chat_template")
    name = name or ("tool_use" if case.get("tools") else None)
    named = folder / f"{family}.{name}.jinja"
    return (named if named.exists() else folder / f"{family}.jinja").read_text(encoding="utf-8")


def golden(folder):
    families = json.loads((folder / "families.json").read_text(encoding="utf-8"))
    cases = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    for family, special in families.items():
        yield family, {
            case["name"]: render(template_for(folder, family, case), messages_for(family, case["messages"]), special, case)
            for case in cases
            if family in case.get("families", [family])
        }
    if folder != HERE:
        return
    sources = json.loads((HERE / "dialect.json").read_text(encoding="utf-8"))
    special = families["chatml"]
    yield "dialect", {source: render(source, cases[0]["messages"], special, {}) for source in sources}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=Path, default=HERE)
    arguments = parser.parse_args()
    check, folder = arguments.check, arguments.folder
    (folder / "golden").mkdir(exist_ok=True)
    differs = []
    for name, results in golden(folder):
        path = folder / "golden" / f"{name}.json"
        text = json.dumps(results, ensure_ascii=False, indent=1) + "\n"
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            differs.append(name)
    if differs:
        sys.exit(f"these differ from their golden files: {', '.join(differs)}")


if __name__ == "__main__":
    main()
