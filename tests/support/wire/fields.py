"""Fields of messages that have a limit, as their descriptors list them."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_INTEGERS = {
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
}


def bounded_fields(message: Descriptor, before: str = "") -> Iterator[str]:
    """The paths of all repeated fields and integers of a message and of those in it."""
    for field in message.fields:
        path = f"{before}{field.name}"
        if field.is_repeated or field.type in _INTEGERS:
            yield path
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from bounded_fields(inner, f"{path}.")
