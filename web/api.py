"""The library's pages, written as Markdown from its sources.

    api.pages(root)              # {path: text}: an overview, a page for each room, and the sources
    api.page("minidist/zero")    # "api/zero.md", the page that a link into the library leads to

A name stands once, on the page of its room, under the name that lessons use: `md.Pipeline`. The
sources are parsed and not imported (public.py), so torch is not needed, and all is written in a
second. Sphinx's autodoc would import torch; autodoc2 writes a page for each file, each name twice,
and takes minutes.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from docstrings import markdown
from public import (
    Function,
    Name,
    Node,
    Sources,
    defined,
    is_dataclass,
    of_function,
    parameters,
    place,
)

LONGEST = 80  # characters of a constant's value; of a longer dict the page has the keys
AROUND = "Around the lessons"  # the part of rooms that no lesson is about
PROPERTIES = {"property", "cached_property"}


def page(path: str) -> str:
    """The page for a file or folder of the library, from the folder of all pages."""
    module = re.sub(r"\.(py|md)$", "", path.strip("/")).replace("/", ".")
    return f"api/{place(module).replace('.', '/') or 'index'}.md"


def pages(root: Path) -> dict[str, str]:
    """All pages of the repository at `root`, by their paths."""
    library = Library(root)
    texts = {"api/README.md": library.reading(), "api/index.md": library.overview()}
    for room in library.rooms.values():
        texts[f"api/{room.name}.md"] = library.room(room)
        for file in library.files(room):
            texts[f"api/{room.name}/{file.stem}.md"] = library.source(room, file)
    return texts


@dataclass
class Room:
    """A module that users know by one name, such as md.planner."""

    module: str
    part: str  # of the course, which teaches it first
    lessons: list[str] = field(default_factory=list)  # by the names of their notebooks
    names: dict[str, Name] = field(default_factory=dict)  # what is public, by its whole name
    title: str = ""

    @property
    def name(self) -> str:
        return place(self.module)


class Library:
    """The rooms of minidist, in the order of the lessons that teach them, and their pages."""

    def __init__(self, root: Path) -> None:
        self.root, self.sources = root, Sources(root)
        self.rooms: dict[str, Room] = {}
        self.lessons: dict[str, str] = {}  # a link, by the name that docstrings have
        self.whole: dict[Name, str] = {}  # md.Pipeline and the like
        part = ""
        for line in (root / "README.md").read_text().splitlines():  # its table of lessons
            if heading := re.match(r"\| \*\*(\w+) (.*)\*\* \|", line):
                part = f"{heading[1]} · {heading[2]}"
            if lesson := re.match(r"\| \d+ \| \[\d+_(\w+)\]\((notebooks/\w+\.ipynb)\)", line):
                name, notebook = lesson.groups()
                title = json.loads((root / notebook).read_text())["cells"][0]["source"][0]
                label = re.match("# ([^:\n]+)", title)
                assert label, f"{notebook} begins with its title"
                self.lessons[name] = f"[{label[1]}](../{notebook})"
                for path in re.findall(r"\]\((minidist/[\w/.]+)\)", line):
                    self._enter(path.removesuffix(".py").replace("/", "."), part, name)
        self._fill(self.sources.public("minidist"))

    def _enter(self, module: str, part: str, *lessons: str) -> None:
        """Note the room that a module belongs to, and who teaches it."""
        deeper = place(module).count(".")
        module = module.rsplit(".", deeper)[0]
        room = self.rooms.setdefault(module, Room(module, part))
        room.lessons += [lesson for lesson in lessons if lesson not in room.lessons]

    def _fill(self, top: dict[str, Name]) -> None:
        """Give each room its names, by the shortest that a lesson can write."""
        for found in top.values():
            self._enter(found.module, AROUND)
        short = {found: f"md.{name}" for name, found in top.items()}
        for room in self.rooms.values():
            room.title = short.get(Name(room.module, ""), room.module)
            for name, found in self._public(room.module, room.title):
                self.whole[found] = name = short.get(found, name)
                room.names[name] = found

    def _public(self, module: str, prefix: str) -> Iterator[tuple[str, Name]]:
        """The public names of a room, also those in a file that is public as a whole."""
        for name, found in self.sources.public(module).items():
            if isinstance(found.node, ast.Module):
                yield from self._public(found.module, f"{prefix}.{name}")
            else:
                yield f"{prefix}.{name}", found

    def files(self, room: Room) -> list[Path]:
        file = self.sources.file(room.module)
        return sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]

    # ---- pages

    def overview(self) -> str:
        """All rooms, in the order of the lessons."""
        text = [
            "# The library",
            markdown(self._doc("minidist")),
            "Here are its rooms, in the order of the lessons that teach them. You can read "
            "its ideas [in an evening](README.md).",
        ]
        for part in dict.fromkeys(room.part for room in self.rooms.values()):
            text.append(f"## {part}")
            for room in self.rooms.values():
                if room.part == part:
                    names = [role(name, name.split(".")[-1]) for name in room.names]
                    text.append(f"### [{room.title}]({room.name}.md)")
                    text.append(f"{self._first_sentence(room)} {self._taught(room)}")
                    text.append(" · ".join(names))
        rooms = "\n".join(room.name for room in self.rooms.values())
        text.append(f"```{{toctree}}\n:hidden:\n\nREADME\n{rooms}\n```")
        return "\n\n".join(text) + "\n"

    def reading(self) -> str:
        """The library's own README. Its links to files lead to their sources."""

        def link(found: re.Match[str]) -> str:
            target = page(f"minidist/{found[1]}").removeprefix("api/").removesuffix(".md")
            return f"]({target if '/' in target else f'{target}/{target}'}.md)"

        text = (self.root / "minidist/README.md").read_text()
        text = re.sub(r"\[([^]]*)\]\(\.\./CONTRIBUTING\.md[^)]*\)", r"\1", text)
        return re.sub(r"\]\(([\w/]+\.py)\)", link, text)

    def room(self, room: Room) -> str:
        links = (f"[`{file.stem}.py`]({room.name}/{file.stem}.md)" for file in self.files(room))
        text = [f"# {room.title}", self._taught(room), self._text(room, self._head(room))]
        text.append(f"Sources: {' · '.join(links)}")
        text += [self._name(room, name, found) for name, found in room.names.items()]
        return "\n\n".join(text) + "\n"

    def source(self, room: Room, file: Path) -> str:
        """A file as it is. Only links lead there, no search."""
        return (
            f"---\norphan: true\nnosearch: true\n---\n\n# {file.relative_to(self.root)}\n\n"
            f"A file of [{room.title}](../{room.name}.md).\n\n"
            f"`````python\n{file.read_text()}`````\n"
        )

    # ---- parts of a page

    def _doc(self, module: str) -> str:
        return ast.get_docstring(self.sources.tree(module)) or ""

    def _head(self, room: Room) -> str:
        """What a room says of itself, without its lessons, which stand above it."""
        doc = self._doc(room.module)
        if not room.lessons:
            return doc
        lesson = rf"(?:{'|'.join(room.lessons)})\b"
        return re.sub(rf"Lessons?:\s{lesson}(?:,\s{lesson})*\.? ?", "", doc)

    def _taught(self, room: Room) -> str:
        lessons = " · ".join(self.lessons[name] for name in room.lessons)
        return f"{'Lessons' if len(room.lessons) > 1 else 'Lesson'}: {lessons}" if lessons else ""

    def _first_sentence(self, room: Room) -> str:
        text = re.sub(r"^Lessons?: [\w, ]+\.\s", "", self._doc(room.module)).partition("\n\n")[0]
        return re.split(r"(?<=\.)\s", text)[0]

    def _text(self, room: Room, doc: str, arguments: Iterable[str] = ()) -> str:
        # The head of the page has its lessons: not again what says no more.
        doc = re.sub(rf"Lessons?:\s{', '.join(room.lessons)}\. ?", "", doc)
        stems = [file.stem for file in self.files(room)]
        names = {f"`{stem}`": f"[`{stem}`]({room.name}/{stem}.md)" for stem in stems}
        names |= {f"`{name}`": role(name) for name in self.whole.values()}
        for name in room.names:
            last = name.split(".")[-1]
            names[f"`{last}`"] = role(name, last)
        for name in arguments:  # which it means, and nothing else of the same name
            names.pop(f"`{name}`", None)
        return markdown(doc, list(arguments), self.lessons, names)

    def _name(self, room: Room, name: str, found: Name) -> str:
        """A name: how it is called, and what its docstring says; of a class, what it has."""
        node = found.node
        if isinstance(node, Function):
            text = self._text(room, found.doc, parameters(node))
            call = self._linked(found.module, of_function(node))
            return directive("function", name + call, text)
        if not isinstance(node, ast.ClassDef):
            return self._value("data", name, found.module, node)
        call = self._linked(found.module, self.sources.signature(found))
        members: dict[str, Node] = {}
        said = re.findall(r"(\w+):", call)  # what its docstring may explain
        for member in node.body:
            said += parameters(member) if isinstance(member, Function) else []
            if (inner := defined(member)) and not inner.startswith("_"):
                members.setdefault(inner, member)  # a property comes before its setter
        parts = [self._text(room, found.doc, [*said, *members])]
        parts += [self._member(room, found, inner, member) for inner, member in members.items()]
        return directive("class", name + call, "\n\n".join(filter(None, parts)), fence="`" * 5)

    def _member(self, room: Room, owner: Name, name: str, node: Node) -> str:
        """A method, or an attribute of which the signature does not say all."""
        if isinstance(node, Function):
            text = self._text(room, ast.get_docstring(node) or "", parameters(node))
            if PROPERTIES & set(map(ast.unparse, node.decorator_list)):
                of = self._type(owner.module, node.returns)
                return directive("property", name, text, type=of)
            call = self._linked(owner.module, of_function(node, method=True))
            return directive("method", name + call, text)
        if is_dataclass(owner.node) and not self.sources.comment(owner.module, node):
            return ""
        return self._value("attribute", name, owner.module, node)

    def _value(self, kind: str, name: str, module: str, node: Node) -> str:
        """A constant or an attribute: its type, its value if that is short, and its comment."""
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        value = short_value(node.value) if kind == "data" and node.value else ""
        comment = self.sources.comment(module, node)
        return directive(kind, name, comment, type=self._type(module, annotation), value=value)

    def _type(self, module: str, annotation: ast.expr | None) -> str:
        return self._linked(module, ast.unparse(annotation)) if annotation else ""

    def _linked(self, module: str, types: str) -> str:
        """Types by their whole names, which Sphinx shortens again, and links."""

        def whole(found: re.Match[str]) -> str:
            try:
                return self.whole.get(self.sources.find(module, found[0]), found[0])
            except LookupError:  # of torch, or of Python
                return found[0]

        return re.sub(r"(?<![\w.'\"=])[A-Z]\w*", whole, types)


def role(name: str, shown: str = "") -> str:
    """A link to a name of the library."""
    return f"{{py:obj}}`{shown} <{name}>`" if shown else f"{{py:obj}}`{name}`"


def directive(kind: str, signature: str, text: str, fence: str = "`" * 4, **options: str) -> str:
    given = [f":{option}: {value}" for option, value in options.items() if value]
    return "\n".join([f"{fence}{{py:{kind}}} {signature}", *given, "", text, fence])


def short_value(node: ast.expr) -> str:
    """A value, or the keys of a dict, or no more than that there is one."""
    whole = ast.unparse(node)
    if len(whole) <= LONGEST:
        return whole
    if isinstance(node, ast.Dict):
        return "{" + ", ".join(f"{ast.unparse(key)}: …" for key in node.keys if key) + "}"
    return "…"
