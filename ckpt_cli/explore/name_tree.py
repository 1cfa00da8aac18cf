"""The tree of names on the left: a level is made when it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Tree

from ckpt_cli.explore.drawn_text import label_of
from ckpt_cli.explore.names import Entry
from ckpt_cli.screen.blocks import bytes_text, shape_text
from core.files.store import override

if TYPE_CHECKING:
    from rich.style import Style
    from textual.widgets.tree import TreeNode

_LEAST_ROOM = 8
"""Least columns of a name; where there are fewer, textual cuts it off."""
_OPEN_AT_START = 12
"""Levels are opened at the start as long as they have at most so many entries together."""


class NameTree(Tree[Entry]):
    """The names of a checkpoint; the root is the checkpoint."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "fold", "Fold", show=False),
        Binding("right", "unfold", "Unfold", show=False),
    ]
    guide_depth = 2
    auto_expand = True

    def show_names(self, label: Text, checkpoint: Entry, objects: Entry | None) -> None:
        """Show the first levels of a checkpoint.

        Args:
            label: name of the checkpoint.
            checkpoint: the root of the tensors.
            objects: the root of the objects; None without any.
        """
        self.root.set_label(label)
        self.root.data = checkpoint
        self._fill(self.root)
        if objects is not None:
            self._add(self.root, objects)
        self.root.expand()
        # Open level after level while there is room for it.
        nodes = list(self.root.children)
        n_open = len(nodes)
        for node in nodes:
            if node.data is None or node.data.kind != "module" or len(nodes) > _OPEN_AT_START:
                continue
            self._fill(node)
            n_open += len(node.children)
            if n_open <= _OPEN_AT_START:
                node.expand()
        self.move_cursor(self.root)

    def reveal(self, path: tuple[str, ...], kind: str) -> None:
        """Open the levels above a name, and move the cursor there.

        Args:
            path: components of the name.
            kind: ``tensor`` or ``object``.
        """
        node = self.root
        while True:
            self._fill(node)
            node.expand()
            below = [
                child
                for child in node.children
                if child.data is not None and self._leads_to(child.data, path, kind)
            ]
            if not below:
                break
            node = below[0]
            if node.data is not None and node.data.kind == kind and node.data.path == path:
                break
        self.call_after_refresh(self.move_cursor, node)

    def action_unfold(self) -> None:
        """Open the entry at the cursor; go to its first child if it is open."""
        node = self.cursor_node
        if node is None or not node.allow_expand:
            return
        if node.is_expanded and node.children:
            self.move_cursor(node.children[0])
        else:
            node.expand()

    def action_fold(self) -> None:
        """Close the entry at the cursor; go to its parent if it is closed."""
        node = self.cursor_node
        if node is None:
            return
        if node.allow_expand and node.is_expanded and node is not self.root:
            node.collapse()
        elif node.parent is not None:
            self.move_cursor(node.parent)

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Entry]) -> None:
        """Make the level that was opened."""
        self._fill(event.node)

    @override
    def render_label(self, node: TreeNode[Entry], base_style: Style, style: Style) -> Text:
        # Called for the lines that are drawn; the middle of a name is left out, not its end.
        label = super().render_label(node, base_style, style)
        depth = 0
        parent = node.parent
        while parent is not None:
            depth, parent = depth + 1, parent.parent
        room = self.scrollable_content_region.width - self.guide_depth * depth
        if room < _LEAST_ROOM + 2 or label.cell_len <= room:
            return label
        mark = Text(self.ICON_NODE_EXPANDED if node.is_expanded else self.ICON_NODE)
        prefix = mark if node.allow_expand else Text("")
        entry = node.data
        name = "" if entry is None else entry.label or str(node.label)
        size = _size_of(entry) if entry is not None and entry.kind in ("module", "range") else ""
        width = room - prefix.cell_len - len(size)
        if width < _LEAST_ROOM:
            size, width = "", room - prefix.cell_len
        short = label_of(name, width=width)
        text = Text.assemble(prefix, short, (size, "dim"), no_wrap=True)
        text.stylize(style)
        return text

    def _fill(self, node: TreeNode[Entry]) -> None:
        """Add the children of a node, if that was not done."""
        if node.data is None or node.children:
            return
        for entry in node.data.children():
            self._add(node, entry)

    def _add(self, node: TreeNode[Entry], entry: Entry) -> None:
        """Add a child: its name, and a tensor's shape or a module's size."""
        label = label_of(entry.label).append(_size_of(entry), "dim")
        node.add(label, entry, allow_expand=entry.has_children)

    def _leads_to(self, entry: Entry, path: tuple[str, ...], kind: str) -> bool:
        """Return whether a name of a kind is that of an entry, or below it."""
        return (kind == "object") == entry.is_object and entry.covers(path)


def _size_of(entry: Entry) -> str:
    """Return what follows the name of an entry: the shape of a tensor, the size of a module."""
    if entry.is_object:
        return ""
    tensor = entry.branch.meta if entry.kind == "tensor" else None
    return f" {bytes_text(entry.n_bytes) if tensor is None else shape_text(tensor.shape)}"
