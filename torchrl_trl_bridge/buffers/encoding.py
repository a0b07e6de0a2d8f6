"""Values of any kind that a replay buffer holds ↔ a JSON tree and tensors, many values at once.

Values of one form (tensors of a dtype, tensordicts of the same keys, objects of a tensor class, Python values) are
taken together, so that a column of a hundred thousand rows becomes one tensor. What comes back is what was there:
classes, dtypes, the order of keys, fields that are None. Nothing is pickled.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchrl_trl_bridge.compat import tensordict as compat

Node = dict[str, Any]

_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
_TAG = "~"


class Encoder:
    """Encodes values; the tensors are gathered in ``tensors``, by the name that the tree has for each."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._memories: set[int] = set()

    def encode(self, values: Sequence[Any], path: str = "") -> Node:
        """The tree of some values.

        Args:
            values: any values.
            path: where they are, for errors.

        Raises:
            TypeError: for an object that has no open form.
        """
        groups: dict[Any, list[Any]] = {}
        which: list[int] = []
        numbers: dict[Any, int] = {}
        for value in values:
            form = _form(value)
            groups.setdefault(form, []).append(value)
            which.append(numbers.setdefault(form, len(numbers)))
        if len(groups) == 1:
            form, values = next(iter(groups.items()))
            return self._encode_group(form, values, path)
        nodes = [self._encode_group(form, members, path) for form, members in groups.items()]
        return {"type": "mixed", "which": self._keep(torch.tensor(which)), "groups": nodes}

    def _encode_group(self, form: Any, values: list[Any], path: str) -> Node:
        node: Node = {"type": form[0]}
        if form[0] == "tensors":
            node |= {"device": form[3], **self._tensors(values)}
        elif form[0] == "nested":
            node |= {"layout": str(form[1]), "counts": [value.size(0) for value in values]}
            node["items"] = self.encode([item for value in values for item in value.unbind()], path)
        elif form[0] == "tensordicts":
            _, keys, dims, device, names = form
            items = [list(value.items()) for value in values]
            node |= {"keys": list(keys), "device": device, "names": names, "count": len(values)}
            node["batch_size"] = self._shapes([value.batch_size for value in values], dims)
            node["fields"] = [
                self.encode([item[i][1] for item in items], f"{path}.{key}".lstrip(".")) for i, key in enumerate(keys)
            ]
        elif form[0] == "stacks":
            node |= {"class": _name_of(form[1]), "dim": form[2]}
            node["counts"] = self._keep(torch.tensor([len(value.tensordicts) for value in values]))
            node["items"] = self.encode([item for value in values for item in value.tensordicts], path)
        elif form[0] == "classes":
            parts = [compat.parts_of_tensor_class(value) for value in values]
            node["class"] = _name_of(form[1])
            node["tensordicts"] = self.encode([tensordict for tensordict, _ in parts], path)
            fields = list(parts[0][1])
            node["fields"] = fields
            node["values"] = [
                self.encode([part[1][field] for part in parts], f"{path}.{field}".lstrip(".")) for field in fields
            ]
        else:
            plain = all(type(value) in _AS_THEY_ARE for value in values)
            node["values"] = values if plain else [self._plain(value, path) for value in values]
        return node

    def _tensors(self, values: list[torch.Tensor]) -> Node:
        first = values[0]
        if first.is_complex():
            return {"complex": True, **self._tensors([torch.view_as_real(value) for value in values])}
        shapes = self._shapes([value.shape for value in values], first.dim())
        with torch.no_grad():
            if isinstance(shapes, list):
                data = first[None] if len(values) == 1 else torch.stack(values)
            else:
                data = torch.cat(values if first.dim() == 1 else [value.reshape(-1) for value in values])
        return {"count": len(values), "shapes": shapes, "data": self._keep(data)}

    def _shapes(self, shapes: list[Any], dims: int) -> Any:
        """One shape as a list where all are the same, else a tensor of them."""
        first = shapes[0]
        if all(shape == first for shape in shapes):
            return list(first)
        return self._keep(torch.tensor(list(itertools.chain(*shapes))).view(len(shapes), dims))

    def _keep(self, tensor: torch.Tensor) -> str:
        name = str(len(self.tensors))
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        if memory in self._memories:  # safetensors takes no two views of one memory
            tensor = tensor.clone()
        self._memories.add(memory)
        self.tensors[name] = tensor
        return name

    def _plain(self, value: Any, path: str) -> Any:
        """A Python value as JSON has it, with a tag on what JSON has no word for."""
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "is": repr(value)}
        if kind is list:
            return [self._plain(item, path) for item in value]
        if kind is dict:
            if all(type(key) is str for key in value) and _TAG not in value:
                return {key: self._plain(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
            return {_TAG: "dict", "is": [[self._plain(k, path), self._plain(v, path)] for k, v in value.items()]}
        if kind in (tuple, set, frozenset):
            return {_TAG: kind.__name__, "is": [self._plain(item, path) for item in value]}
        if kind is bytes:
            return {_TAG: "bytes", "is": base64.b64encode(value).decode()}
        if kind is torch.Size:
            return {_TAG: "size", "is": list(value)}
        if kind in (torch.dtype, torch.device):
            return {_TAG: kind.__name__, "is": str(value)}
        if isinstance(value, (np.ndarray, np.generic)):
            scalar = isinstance(value, np.generic)
            return {_TAG: "numpy", "is": self._keep(torch.from_numpy(np.array(value))), "scalar": scalar}
        if isinstance(value, list):  # TorchRL's own kind of list
            return {_TAG: "list", "class": _name_of(kind), "is": [self._plain(item, path) for item in value]}
        if isinstance(value, torch.Tensor) or compat.is_collection(value):
            return {_TAG: "values", "is": self.encode([value], path)}
        raise TypeError(
            f"{path or 'a row'} holds a {kind.__module__}.{kind.__qualname__}, which has no open form: it cannot be "
            "saved. Store it as numbers, strings, lists or dictionaries of them, or tensors."
        )


def decode(node: Node, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """The values of a tree that `Encoder.encode` made.

    Raises:
        TypeError: if it names a class that is no tensor class, tensordict or list.
    """
    return list(_DECODERS[node["type"]](node, tensors))


def _decode_mixed(node: Node, tensors: dict[str, torch.Tensor]) -> list[Any]:
    groups = [iter(decode(group, tensors)) for group in node["groups"]]
    return [next(groups[i]) for i in tensors[node["which"]].tolist()]


def _decode_tensors(node: Node, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    data = tensors[node["data"]]
    if isinstance(node["shapes"], list):
        values = list(data.unbind(0))
    else:
        shapes = tensors[node["shapes"]]
        parts = data.split_with_sizes(shapes.prod(1).tolist())
        values = list(parts)
        if shapes.size(1) != 1:
            values = [part.view(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]
    if len(values) > 1:  # each its own, or one row would keep all others in memory
        values = [value.clone() for value in values]
    if node.get("complex"):
        values = [torch.view_as_complex(value) for value in values]
    device = _device(node["device"])
    return values if device is None or device.type == "cpu" else [value.to(device) for value in values]


def _decode_nested(node: Node, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    layout = torch.jagged if "jagged" in node["layout"] else torch.strided
    items = decode(node["items"], tensors)
    return [torch.nested.as_nested_tensor(part, layout=layout) for part in _parts(items, node["counts"])]


def _decode_tensordicts(node: Node, tensors: dict[str, torch.Tensor]) -> list[Any]:
    fields = [decode(field, tensors) for field in node["fields"]]
    shape, count = node["batch_size"], node["count"]
    sizes = itertools.repeat(shape, count) if isinstance(shape, list) else tensors[shape].tolist()
    device, names, keys = _device(node["device"]), node["names"], node["keys"]
    rows = zip(*fields, strict=True) if fields else itertools.repeat((), count)
    return [
        compat.tensordict_of(dict(zip(keys, row, strict=True)), torch.Size(size), device, names)
        for row, size in zip(rows, sizes, strict=True)
    ]


def _decode_stacks(node: Node, tensors: dict[str, torch.Tensor]) -> list[Any]:
    cls = _class_named(node["class"], compat.is_stack_class)
    items = decode(node["items"], tensors)
    return [compat.stack_of(cls, part, node["dim"]) for part in _parts(items, tensors[node["counts"]].tolist())]


def _decode_classes(node: Node, tensors: dict[str, torch.Tensor]) -> list[Any]:
    cls = _class_named(node["class"], compat.is_tensor_class)
    columns = [decode(column, tensors) for column in node["values"]]
    tensordicts = decode(node["tensordicts"], tensors)
    rows = zip(*columns, strict=True) if columns else itertools.repeat((), len(tensordicts))
    return [
        compat.tensor_class_of(cls, tensordict, dict(zip(node["fields"], row, strict=True)))
        for tensordict, row in zip(tensordicts, rows, strict=True)
    ]


def _decode_python(node: Node, tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [value if type(value) in _AS_THEY_ARE else _value_of(value, tensors) for value in node["values"]]


_DECODERS: dict[str, Callable[[Node, dict[str, torch.Tensor]], list[Any]]] = {
    "mixed": _decode_mixed,
    "tensors": _decode_tensors,
    "nested": _decode_nested,
    "tensordicts": _decode_tensordicts,
    "stacks": _decode_stacks,
    "classes": _decode_classes,
    "python": _decode_python,
}

_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}

_SCALARS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "size": torch.Size,
    "device": torch.device,
}


def _value_of(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_value_of(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _value_of(item, tensors) for key, item in value.items()}
    inside = value["is"]
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag]([_value_of(item, tensors) for item in inside])
    if tag == "list":
        return _class_named(value["class"], lambda cls: issubclass(cls, list))(_value_of(inside, tensors))
    if tag == "values":
        return decode(inside, tensors)[0]
    if tag == "numpy":
        array = tensors[inside].numpy().copy()
        return array[()] if value["scalar"] else array
    if tag == "dtype":
        return getattr(torch, inside.removeprefix("torch."))
    return _SCALARS[tag](inside)


def _form(value: Any) -> tuple[Any, ...]:
    """What values that are encoded together have in common; the first item is the type of their node."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested", value.layout
        return "tensors", value.dtype, value.ndim, "cpu" if value.is_cpu else str(value.device)
    if not compat.is_collection(value):
        return ("python",)
    cls = type(value)
    if compat.is_tensor_class(cls):
        return "classes", cls, tuple(compat.parts_of_tensor_class(value)[1])
    if compat.is_stack_class(cls):
        return "stacks", cls, value.stack_dim
    device = None if value.device is None else str(value.device)
    names = list(value.names) if any(name is not None for name in value.names) else None
    return "tensordicts", tuple(value.keys()), len(value.batch_size), device, None if names is None else tuple(names)


def _parts(items: list[Any], counts: list[int]) -> list[list[Any]]:
    iterator = iter(items)
    return [list(itertools.islice(iterator, count)) for count in counts]


def _device(name: str | None) -> torch.device | None:
    """The device of that name, or the CPU where this machine has no such."""
    if name is None:
        return None
    device = torch.device(name)
    available = device.type in ("cpu", "meta") or (device.type == "cuda" and torch.cuda.is_available())
    return device if available else torch.device("cpu")


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class_named(name: str, allowed: Callable[[type], bool]) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not allowed(found):
        raise TypeError(f"{name!r} is no class that a replay buffer holds: the file has been changed.")
    return found
