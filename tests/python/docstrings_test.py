# SPDX-License-Identifier: Apache-2.0
"""Every public class and callable says what it takes, gives, raises, and how it is used: a line for each argument of
its signature and for no other, and an example, which is run where it needs no GPU."""

import doctest
import importlib
import importlib.util
import inspect
import re
import types
import unittest
import warnings

import tessera
import torch

PUBLIC_MODULES = ("tessera.losses", "tessera.huggingface", "tessera.integrations.megatron",
                  "tessera.integrations.torchtitan")
SECTIONS = ("Args", "Returns", "Raises", "Example")
SECTION = re.compile(rf"^(?P<name>{'|'.join(SECTIONS)}):$", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (\S.*)$")


def public() -> dict:
    """Name -> object: what the package exports, what its documented modules define, and the public members of both."""
    found = {f"tessera.{name}": getattr(tessera, name) for name in tessera.__all__ if name != "__version__"}
    for path in PUBLIC_MODULES:
        module = importlib.import_module(path)
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == path and value not in found.values():
                found[f"{path}.{name}"] = value
    members = {}
    for path, value in found.items():
        if inspect.isclass(value):
            for name, member in vars(value).items():
                plain = inspect.isfunction(member) or isinstance(member, (property, staticmethod, classmethod))
                if plain and (not name.startswith("_") or name == "__call__"):
                    members[f"{path}.{name}"] = member
    return found | members


def sections(text: str) -> dict[str, str]:
    """Section -> its lines."""
    starts = list(SECTION.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    return {start["name"]: text[start.end():end].strip("\n") for start, end in zip(starts, ends, strict=False)}


def signature_of(value) -> inspect.Signature | None:
    if isinstance(value, property):
        return None
    if inspect.isclass(value) and issubclass(value, tuple):
        return inspect.Signature([inspect.Parameter(field, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                                  for field in value._fields])
    return inspect.signature(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)


def complaints(path: str, value) -> list[str]:
    text = inspect.cleandoc((value.fget if isinstance(value, property) else value).__doc__ or "")
    found, signature = sections(text), signature_of(value)
    is_class, is_member = inspect.isclass(value), path.count(".") > 1 and not inspect.isclass(value)
    names = [] if signature is None else list(signature.parameters)
    # Functions that a framework calls as methods describe `self`, which is the framework's module.
    if names[:1] == ["self"] and "." in getattr(value, "__qualname__", ""):
        names = names[1:]
    out = []
    if not text or SECTION.match(text):
        out.append("no summary")
    if list(found) != [name for name in SECTIONS if name in found]:
        out.append(f"sections in another order: {list(found)}")
    entries = [ENTRY.match(line) for line in found.get("Args", "").splitlines()]
    described = [entry[1] for entry in entries if entry]
    out += [f"argument {name}: not described" for name in names if name not in described]
    out += [f"argument {name}: described, and there is none" for name in described if name not in names]
    if len(described) != len(set(described)):
        out.append("an argument is described twice")
    if not names and "Args" in found:
        out.append("Args, and there are none")
    gives = not is_class and (signature is None or signature.return_annotation is not None)
    if gives != bool(found.get("Returns")):
        out.append("no Returns" if gives else "Returns, and nothing is returned")
    if not found.get("Raises"):
        out.append("no Raises")
    if (names or not is_member) and ">>> " not in found.get("Example", ""):
        out.append("no Example")
    return [f"{path}: {each}" for each in out]


class Docstrings(unittest.TestCase):
    def test_every_public_object(self):
        walked = public()
        found = [each for path, value in walked.items() for each in complaints(path, value)]
        print(f"{len(walked)} public objects")
        self.assertEqual(found, [])
        self.assertGreater(len(walked), 40)
        for name in ("tessera.moe", "tessera.MoE.forward", "tessera.ExpertParallel.__call__",
                     "tessera.integrations.torchtitan.use_tessera", "tessera.huggingface.prepare"):
            self.assertIn(name, walked)

    def test_finds_each_fault(self):
        """The walk reports what is missing, and what it names though it does not exist."""
        def good(a, b=None):
            """Adds.

            Args:
                a: [T] fp32.
                b: [T] fp32, or None.

            Returns:
                [T] fp32.

            Raises:
                Nothing.

            Example:
                >>> good(1)
            """

        self.assertEqual(complaints("tessera.good", good), [])
        for old, new, says in (("    b: [T] fp32, or None.\n", "", "argument b: not described"),
                               ("        b:", "        c:", "argument c: described, and there is none"),
                               ("Args:", "Arguments:", "argument a: not described"),
                               ("Returns:", "Result:", "no Returns"), ("Raises:", "Errors:", "no Raises"),
                               (">>> good(1)", "good(1)", "no Example"), ("a: [T] fp32.", "a:", "argument a: not"),
                               ("Adds.", "", "no summary")):
            with self.subTest(says):
                bad = types.FunctionType(good.__code__, globals(), argdefs=good.__defaults__)
                bad.__doc__ = good.__doc__.replace(old, new)
                self.assertNotEqual(bad.__doc__, good.__doc__)
                self.assertIn(f"tessera.bad: {says}", "\n".join(complaints("tessera.bad", bad)))

    def test_examples(self):
        """Those without `+SKIP`, each in a namespace of its own that has torch and tessera."""
        runner, run = doctest.DocTestRunner(verbose=False), 0
        for path, value in public().items():
            text = inspect.cleandoc((value.fget if isinstance(value, property) else value).__doc__ or "")
            test = doctest.DocTestParser().get_doctest(text, {"torch": torch, "tessera": tessera}, path, path, 0)
            said = []
            with self.subTest(path), warnings.catch_warnings():
                if "huggingface" in path and importlib.util.find_spec("transformers") is None:
                    self.skipTest("transformers is not installed; tools/bootstrap.sh python installs it")
                warnings.simplefilter("error", DeprecationWarning)
                torch.manual_seed(0)
                failed = runner.run(test, out=said.append, clear_globs=False).failed
                self.assertEqual(failed, 0, "".join(said))
                run += sum(doctest.SKIP not in example.options for example in test.examples)
        print(f"{run} lines of examples run")
        self.assertGreater(run, 40)


if __name__ == "__main__":
    unittest.main()
