"""What a fuzzer feeds to a reader: values, and files in the formats of JSON, YAML, lines and tensors.

Half of the mutations know the format: they change one place in the tree of a real file. The others
damage its bytes, and some cases are made from nothing. That is thousands of cases a second;
Hypothesis draws such trees at a hundredth of the speed.
"""

import copy
import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from support.damages import LONG_SHARE, damage_often

Tree = Any  # what JSON and YAML hold


# ---- strange values ---------------------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")
NUMBERS: list[Tree] = [0, -1, 1, 2, 255, 65_536, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63)]
NUMBERS += [2**64, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e16, 1e308, -1e308]
NUMBERS += [NAN, INFINITY, -INFINITY]
TEXTS = ["", " ", "a", "0", "1e5", "true", "null", "~", "NaN", "x" * 300, "../../etc"]
TEXTS += ["/dev/zero", "\0", "a\nb", "a\rb", "\x1b[31m", "\u2028", "\u202e", "\ufeff", "\ud800"]
TEXTS += ["\udcff", "e\u0301", "\U0001f469\u200d\U0001f467", "<script>", "a: b", "- a", "&a", "*a"]
TEXTS += ["!!python/name:os.system", "step-0000001", "model.safetensors", "__class__", "%s%n{}"]


def strange_value(rng: Random) -> Tree:
    choice = rng.random()
    if choice < 0.4:
        return rng.choice(NUMBERS)
    if choice < 0.8:
        return rng.choice(TEXTS)
    if choice < 0.9:
        return rng.choice([None, True, False])
    if choice < 1 - LONG_SHARE:
        return rng.choice([[], {}, [[]], [None], {"": {}}, [0] * 20])
    if choice < 1 - LONG_SHARE / 2:
        return rng.choice(["x" * 20_000, [0] * 2_000])
    nested: Tree = rng.choice(NUMBERS)
    for _ in range(rng.choice([3, 50, 400])):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def free_tree(rng: Random, depth: int = 4) -> Tree:
    """A tree made from nothing."""
    if depth == 0 or rng.random() < 0.3:
        return strange_value(rng)
    if rng.random() < 0.5:
        return [free_tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): free_tree(rng, depth - 1) for _ in range(rng.randrange(4))}


# ---- mutations --------------------------------------------------------------------------------------------------


def mutate_tree(tree: Tree, rng: Random) -> Tree:
    """A copy of the tree that differs in one place, at any depth."""
    if isinstance(tree, dict | list) and tree and rng.random() < 0.8:
        changed = copy.copy(tree)
        place = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        changed[place] = mutate_tree(tree[place], rng)
        return changed
    if isinstance(tree, dict) and tree and rng.random() < 0.8:
        return _mutate_mapping(tree, rng)
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        return _mutate_list(tree, rng)
    if isinstance(tree, str) and rng.random() < 0.5:
        at = rng.randrange(len(tree) + 1)
        return tree[:at] + rng.choice([*TEXTS, tree]) + tree[at + rng.randrange(3) :]
    if type(tree) in (int, float) and abs(tree) < 1e300 and rng.random() < 0.5:
        return rng.choice([tree + 1, tree - 1, -tree, float(tree), str(tree), tree * 10**9])
    if rng.random() < 0.2:
        return rng.choice([[tree], {"a": tree}, str(tree), [tree, tree]])
    return strange_value(rng)


def _mutate_mapping(tree: dict[str, Tree], rng: Random) -> dict[str, Tree]:
    key = rng.choice(list(tree))
    changed = dict(tree)
    what = rng.randrange(4)
    if what == 0:
        del changed[key]
    elif what == 1:
        changed[rng.choice(TEXTS)] = changed.pop(key)
    elif what == 2:
        changed[rng.choice([*TEXTS, key.upper(), key + "s"])] = strange_value(rng)
    else:
        changed[key] = tree[rng.choice(list(tree))]
    return changed


def _mutate_list(tree: list[Tree], rng: Random) -> list[Tree]:
    at = rng.randrange(len(tree))
    return rng.choice(
        [
            tree[:at] + tree[at + 1 :],
            tree[:at] + [strange_value(rng)] + tree[at:],
            tree + tree[at:],
            tree[::-1],
            tree * rng.choice([2, 50]),
        ]
    )


# ---- formats ----------------------------------------------------------------------------------------------------


def dump_json(tree: Tree, rng: Random) -> bytes:
    """JSON as a careless program writes it: NaN, lone surrogates, sometimes a key twice."""
    if isinstance(tree, dict) and tree and rng.random() < 0.05:
        items = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items()]
        return ("{" + ", ".join([*items, rng.choice(items)]) + "}").encode()
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def dump_yaml(tree: Tree, rng: Random, indent: str = "") -> str:
    """YAML in its block style, in which some of the values are JSON."""
    lines = ""
    for key, value in tree.items():
        name = key if rng.random() < 0.95 else json.dumps(key)
        if isinstance(value, dict) and value and rng.random() < 0.8:
            lines += f"{indent}{name}:\n{dump_yaml(value, rng, indent + '  ')}"
        else:
            is_plain = isinstance(value, str) and rng.random() < 0.5
            lines += f"{indent}{name}: {value if is_plain else json.dumps(value)}\n"
    return lines


def vary_json(seeds: Sequence[Tree]) -> Callable[[Random], bytes]:
    """Cases from the values of real JSON files."""

    def make(rng: Random) -> bytes:
        choice = rng.random()
        if choice < 0.1:
            return dump_json(free_tree(rng), rng)
        tree = rng.choice(seeds)
        if choice < 0.4:
            return damage_often(json.dumps(tree).encode(), rng)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            tree = mutate_tree(tree, rng)
        return dump_json(tree, rng)

    return make


def vary_yaml(seeds: Sequence[dict[str, Tree]]) -> Callable[[Random], bytes]:
    def make(rng: Random) -> bytes:
        tree = free_tree(rng) if rng.random() < 0.1 else rng.choice(seeds)
        for _ in range(rng.choice([0, 1, 1, 2])):
            tree = mutate_tree(tree, rng)
        text = dump_yaml(tree, rng) if isinstance(tree, dict) else json.dumps(tree)
        data = text.encode("utf-8", "surrogatepass")
        return damage_often(data, rng) if rng.random() < 0.5 else data

    return make


def vary_lines(make_line: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    """Some lines, a few of which may be anything."""

    def make(rng: Random) -> bytes:
        lines = [make_line(rng) for _ in range(rng.randrange(6))]
        data = b"".join(line + rng.choice([b"\n", b"\n", b"\n", b"\r\n", b""]) for line in lines)
        return damage_often(data, rng) if rng.random() < 0.5 else data

    return make


def vary_bytes(seeds: Sequence[bytes]) -> Callable[[Random], bytes]:
    def make(rng: Random) -> bytes:
        if rng.random() < 0.03:
            return rng.randbytes(rng.randrange(200))
        return damage_often(rng.choice(seeds), rng)

    return make


def vary_safetensors(seeds: Sequence[bytes]) -> Callable[[Random], bytes]:
    """Cases from real safetensors files: mostly their header, which is JSON behind its length."""

    def make(rng: Random) -> bytes:
        data = rng.choice(seeds)
        if rng.random() < 0.2:
            return damage_often(data, rng)
        (n_bytes,) = struct.unpack("<Q", data[:8])
        header = vary_json([json.loads(data[8 : 8 + n_bytes])])(rng)
        length = len(header) if rng.random() < 0.95 else rng.choice([0, 1, 2**63, 10**8, n_bytes])
        return struct.pack("<Q", length) + header + data[8 + n_bytes :]

    return make
