"""Mutates messages with a source of random numbers: their bytes, and the values of their fields."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# Where widths, signs, limits of ours (64 nodes, 128 characters, 1,024 requests) and tiny
# vocabularies end; as many as fit are tried of each.
_NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 63, 64, 65, 127, 128, 255, 256, 500, 512, 1023, 1024),
    *(2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
)
_FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 1e-38, 1e-45, 5e-324, 1e-320, 1e38, 3.5e38, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), 87.0, -87.0, 89.0, 1.0000001, 0.9999999),
)
_STRINGS = (
    *("", "r", "block", "token", "greedy_block", "spectr", "gbv", "no_such_rule", "block "),
    *("\x00", "a\nb", "\u202e", "é" * 64, "é" * 65, "x" * 128, "x" * 129, "\ud7ff\U0010ffff"),
    "00-" + 32 * "1" + "-" + 16 * "2" + "-01",
    "00-" + 32 * "0" + "-" + 16 * "0" + "-00",
)
_MOST_BYTES = 1 << 14
_JSON: Sequence[Callable[[], Any]] = (
    *(lambda: None, lambda: True, lambda: False, list, dict),
    *(lambda value=value: value for value in (*_NUMBERS, *_FLOATS, *_STRINGS)),
    *(lambda value=value: -value for value in _NUMBERS),
    *(lambda: [1, 2], lambda: ["a", "b"], lambda: [[1], [2]], lambda: [1, "a"], lambda: [{}] * 9),
    *(lambda: {"type": "text", "text": "a"}, lambda: "\ud800", lambda: [None]),
)

_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_FIXED64: 64,
    FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_ENUM: 31,
    FieldDescriptor.TYPE_INT32: 31,
    FieldDescriptor.TYPE_INT64: 63,
}


def mutant(source: random.Random, seeds: Sequence[Message]) -> bytes:
    """A valid message, changed in a few ways; now and then it comes as it is."""
    message = type(seeds[0])()
    message.CopyFrom(source.choice(seeds))
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        change(source, message)
    data: bytes = message.SerializeToString()
    if source.random() < 0.3:
        data = scrambled(source, data, source.choice(seeds).SerializeToString())
    return data[:_MOST_BYTES]


def scrambled(source: random.Random, data: bytes, other: bytes) -> bytes:
    """Bytes, changed in a few ways, perhaps with parts of others."""
    for _ in range(source.choice((1, 1, 2, 4))):
        data = source.choice(_BYTE_CHANGES)(source, data, other)
    return data[:_MOST_BYTES]


def mutant_json(source: random.Random, seeds: Sequence[Mapping[str, Any]]) -> bytes:
    """The same of JSON objects: the values of fields, also of fields within them, and bytes."""
    body: dict[str, Any] = copy.deepcopy(dict(source.choice(seeds)))
    names = sorted({name for seed in seeds for name in seed})
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        inside: Any = body
        place: Any = source.choice(names)
        while isinstance(inner := _at(inside, place), dict | list) and inner:
            if source.random() < 0.4:
                break
            inside = inner
            keys = range(len(inner)) if isinstance(inner, list) else sorted(inner)
            place = source.choice(keys)
        if isinstance(inside, dict) and source.random() < 0.05:
            inside.pop(place, None)
        else:
            inside[place] = source.choice(_JSON)()
    data = json.dumps(body).encode()
    if source.random() < 0.3:
        data = scrambled(source, data, json.dumps(source.choice(seeds)).encode())
    return data


def _at(inside: Any, place: Any) -> Any:
    return inside.get(place) if isinstance(inside, dict) else inside[place]


def _flip(source: random.Random, data: bytes, other: bytes) -> bytes:
    if not data:
        return data
    at = source.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << source.randrange(8)]) + data[at + 1 :]


def _set(source: random.Random, data: bytes, other: bytes) -> bytes:
    at = source.randrange(len(data) + 1)
    return data[:at] + bytes([source.choice((0, 1, 0x7F, 0x80, 0xFF))]) + data[at + 1 :]


def _cut(source: random.Random, data: bytes, other: bytes) -> bytes:
    start, end = sorted(source.randrange(len(data) + 1) for _ in range(2))
    return data[:start] if source.random() < 0.3 else data[:start] + data[end:]


def _repeat(source: random.Random, data: bytes, other: bytes) -> bytes:
    start, end = sorted(source.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[start:end] * source.choice((1, 1, 3)) + data[end:]


def _splice(source: random.Random, data: bytes, other: bytes) -> bytes:
    at = source.randrange(len(data) + 1)
    start, end = sorted(source.randrange(len(other) + 1) for _ in range(2))
    return data[:at] + other[start:end] + data[at:]


def _varint(source: random.Random, data: bytes, other: bytes) -> bytes:
    """Another number where one may stand: a value, a tag or a length."""
    at = source.randrange(len(data) + 1)
    number, encoded = source.choice(_NUMBERS), bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    if source.random() < 0.1:  # longer than it has to be, or than it may be
        encoded = bytearray(b"\x80" * source.randrange(1, 11) + bytes([encoded[-1]]))
    return data[:at] + bytes(encoded) + data[at + 1 :]


_BYTE_CHANGES: Sequence[Callable[[random.Random, bytes, bytes], bytes]] = (
    *(_flip, _set, _cut, _repeat, _splice, _varint),
)


def change(source: random.Random, message: Message) -> None:
    """Change one field, of the message or of one within it."""
    descriptor: Any = message.DESCRIPTOR
    fields: Sequence[Any] = descriptor.fields
    if not fields:
        return
    used = [field for field, _ in message.ListFields()]
    field = source.choice(used if used and source.random() < 0.85 else fields)
    if field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry:
        _change_map(source, getattr(message, field.name), field)
    elif field.is_repeated:
        _change_list(source, getattr(message, field.name), field)
    elif source.random() < 0.05:
        message.ClearField(field.name)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        change(source, inner)
    else:
        _assign(source, message, field)


def _assign(source: random.Random, message: Message, field: Any) -> None:
    value = _value(source, field, getattr(message, field.name))
    if field.enum_type is not None and field.enum_type.values_by_number.get(value) is None:
        value = 0  # open enums are left to changed bytes
    setattr(message, field.name, value)


# Keys that mean something somewhere, and some that never do.
_KEYS = ("epsilon", "delta", "", "gamma", "\0", "x" * 300)
_IDS = (0, 1, 4, 5, 31, 32, 63, 2**31, 2**32 - 1)


def _change_map(source: random.Random, values: Any, field: Any) -> None:
    value = field.message_type.fields_by_name["value"]
    named = field.message_type.fields_by_name["key"].type == field.TYPE_STRING
    if values and source.randrange(4) == 0:
        del values[source.choice(sorted(values))]
    else:
        key: Any = source.choice(_KEYS) if named else source.choice(_IDS)
        values[key] = _value(source, value, values.get(key, 0))


def _change_list(source: random.Random, values: Any, field: Any) -> None:
    count = len(values)
    place = source.randrange(count) if count else 0
    kind = source.randrange(6)
    if field.message_type is not None:
        if not count or kind == 0:
            change(source, values.add())
        elif kind == 1:
            del values[place]
        elif kind == 2:
            values.add().CopyFrom(values[place])
        else:
            change(source, values[place])
        return
    if kind == 0 and count:
        del values[place]
    elif kind == 1 and count:
        values.append(values[place])
    elif kind == 2 and count > 1:
        other = source.randrange(count)
        values[place], values[other] = values[other], values[place]
    elif kind == 3:
        some = [_value(source, field, 0) for _ in range(source.choice((1, 2, 8, 70)))]
        values.extend(some)
    elif count:
        values[place] = _value(source, field, values[place])
    else:
        values.append(_value(source, field, 0))


def _value(source: random.Random, field: Any, old: Any) -> Any:
    """Something else for a field; numbers are often neighbours of what was there."""
    if (bits := _BITS.get(field.type)) is not None:
        if source.random() < 0.4:
            return (int(old) + source.choice((-1, 1, 2, -2))) % 2**bits
        return source.choice(_NUMBERS) % 2**bits
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not old
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return source.choice(_FLOATS)
    if field.type == FieldDescriptor.TYPE_STRING:
        return source.choice(_STRINGS)
    assert field.type == FieldDescriptor.TYPE_BYTES, field.type
    return source.choice(_BYTE_CHANGES)(source, old or b"", bytes(range(16)))
