# SPDX-License-Identifier: Apache-2.0
"""Sources in which a number, chosen when the program runs, decides at each mutated place what is done there.

A place is the smallest expression that holds all that a mutant changes: what stands between brackets or commas, or
behind `=` or `return`. Where none does, the place is the statement, or the statements, that hold it. A declaration is
no such statement, and what the compiler has to know is no such expression.
"""
import re
import typing

# The number, 0 where no mutant is chosen (chosen_mutant.hpp).
CHOSEN = "::chosen_mutant"

OPEN, CLOSE = "([{", ")]}"
ELSE, RETURN = re.compile(r"\belse\b"), re.compile(r"\breturn\b")
AHEAD_OF_BLOCK = re.compile(r"([)\];}]|\b(else|do|const|noexcept))\s*\Z")


class Place(typing.NamedTuple):
    """text[begin:end], what stands there instead, and whether these are statements."""
    begin: int
    end: int
    new: str
    is_statement: bool


def code_of(text):
    """The text with spaces for comments, and a `;` for each character of a line of the preprocessor."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL)
    return re.sub(r"^ *#[^\n]*", lambda found: ";" * len(found[0]), text, flags=re.MULTILINE)


def begins_block(code, brace):
    """Whether statements stand behind the bracket at `brace`; where not, values or arguments."""
    return code[brace] == "{" and AHEAD_OF_BLOCK.search(code[max(0, brace - 100):brace]) is not None


def is_assignment(code, at):
    return code[at] == "=" and code[at + 1] != "=" and (code[at - 1] not in "=!<>" or code[at - 2:at] in ("<<", ">>"))


def opener_of(code, at):
    """Where the bracket stands that is open at `at`."""
    depth = 0
    for i in range(at - 1, -1, -1):
        depth += (code[i] in CLOSE) - (code[i] in OPEN)
        if depth < 0:
            return i
    raise ValueError("nothing is open")


def unmatched(part):
    """How many brackets `part` closes that it does not open, and whether a comma or a `;` stands outside of all that it
    opens."""
    depth, least, parts = 0, 0, False
    for c in part:
        depth += (c in OPEN) - (c in CLOSE)
        parts = (parts and depth >= least) or (c in ",;" and depth == least)
        least = min(least, depth)
    return -least, parts


def begin_of(code, at, closed, is_statement):
    """Where the expression, or the statement, begins that holds code[at] and `closed` brackets more that are open
    there; and whether a statement begins there."""
    depth = closed
    for i in range(at - 1, -1, -1):
        c = code[i]
        if c in CLOSE:
            if depth == 0 and c == "}" and begins_block(code, opener_of(code, i)):
                return i + 1, True
            depth += 1
        elif c in OPEN and depth > 0:
            depth -= 1
        elif c in OPEN:
            if begins_block(code, i):
                return i + 1, True
            if not is_statement:
                return i + 1, False
        elif depth == 0:
            if c == ";" and begins_block(code, opener_of(code, i)):
                return i + 1, True
            if ELSE.match(code, i):
                return i + len("else"), True
            if not is_statement and (c in ",;" or is_assignment(code, i)):
                return i + 1, False
            if not is_statement and RETURN.match(code, i):
                return i + len("return"), False
    raise ValueError("a place begins nowhere")


def end_of(code, begin, least, is_statement):
    """Where the expression, or the statement, ends that begins at `begin`: at `least` or later."""
    blocks = []  # whether each bracket that is open began a block
    for i in range(begin, len(code)):
        c = code[i]
        if c in OPEN:
            blocks.append(begins_block(code, i))
        elif c in CLOSE:
            if not blocks:
                return i
            ends = blocks.pop() and not blocks and is_statement
            if ends and i + 1 >= least and not re.compile(r"\s*else\b").match(code, i + 1):
                return i + 1
        elif not blocks and c == ";" and i + is_statement >= least:
            return i + is_statement
        elif not blocks and c == "," and not is_statement and i >= least:
            return i
    raise ValueError("a place ends nowhere")


def difference(old, new):
    """What two texts begin with alike, and what of each is left without that and what they end with alike."""
    olds, news = (re.findall(r"\w+|\W", part) for part in (old, new))
    same = 0
    while same < min(len(olds), len(news)) and olds[same] == news[same]:
        same += 1
    ahead, olds, news = "".join(olds[:same]), olds[same:], news[same:]
    while olds and news and olds[-1] == news[-1]:
        olds.pop()
        news.pop()
    return ahead, "".join(olds), "".join(news)


def place_of(text, old, new):
    """The place of a mutant whose text `old`, which stands once in `text`, becomes `new`."""
    ahead, differs, instead = difference(old, new)
    begin = text.index(old) + len(ahead) + len(differs) - len(differs.lstrip())
    end = begin + len(differs.strip())
    code = code_of(text)
    (closed, parts), (closed_instead, parts_instead) = unmatched(differs), unmatched(instead)
    is_statement = parts or parts_instead
    first, begins_statement = begin_of(code, begin, max(closed, closed_instead), is_statement)
    first = min(begin, first + len(code[first:]) - len(code[first:].lstrip()))
    is_statement = is_statement or begins_statement
    last = end_of(code, first, end, is_statement)
    return Place(first, last, text[first:begin] + instead + text[end:last], is_statement)


def holds(one, other):
    """Whether one place holds the other, which is smaller."""
    return one.begin <= other.begin and other.end <= one.end and one[:2] != other[:2]


def cross(one, other):
    """Whether two places share some of the text, and none of them holds the other: no text can have both."""
    return (one.begin < other.end and other.begin < one.end and one[:2] != other[:2] and
            not holds(one, other) and not holds(other, one))


def at_run_time(text, declarations):
    """The text, as long as it was, without `constexpr` and `consteval` in what is listed."""
    for declaration in declarations:
        if declaration not in text:
            raise ValueError(f"not there any more: {declaration}")
        text = text.replace(declaration, re.sub(r"\bconst(expr|eval)\b", " " * len("constexpr"), declaration))
    return text


def switched(text, places):
    """The text in which each place, of a list of (number, place), is what it was unless its number is chosen."""
    outer = {place[:2] for _, place in places if not any(holds(other, place) for _, other in places)}
    for begin, end in sorted(outer, reverse=True):
        here = [(number, place) for number, place in places if begin <= place.begin and place.end <= end]
        what = switched(text[begin:end], [(number, place._replace(begin=place.begin - begin, end=place.end - begin))
                                          for number, place in here if place[:2] != (begin, end)])
        for number, place in here:
            if place[:2] != (begin, end):
                continue
            if place.is_statement:
                what = f"if ({CHOSEN} == {number}) {{ {place.new}; }} else {{ {what} }}"
            else:
                what = f"({CHOSEN} == {number} ? ({place.new}) : ({what}))"
        text = text[:begin] + what + text[end:]
    return text
