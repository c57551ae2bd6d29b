"""Answers as Markdown: as markdown-it shows them, the same whether they come whole or in pieces, and harmless."""

import random
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from pages import DESKTOP, visit

DOCUMENT = r"""# Plan for *today*

A paragraph with **bold**, *slanted*, ***both***, ~~gone~~, `code with * stars` and snake_case_names, 2 * 3 * 4.
Its second line, a [link](https://example.org/a_(b)?x=1&y=2), \*escaped\* stars and __strong__ words.

1. first
2. second, with `code`
   - nested *one*
   - nested two
     1. deeper

        ```text
        in a list
        ```
3. third

* star
* star **bold**

```python
def f(x):
    return x * 2  # **not bold** <b>
```

~~~
tildes ``` inside
~~~

> A quote with **weight**
> over two lines
>
> - and a list

| name | value |
|:-----|------:|
| `a`  | 1 |
| b \| c | **2** |

---

Setext and *an unclosed star, **two stars, `a tick, [brackets] and 5 < 6 & 7 > 2.

7. seven
8. eight
"""

TREE = """text => import('/page/markdown.js').then(({ render }) => {
  const element = document.createElement('div');
  render(element, text);
  const tree = node => node.nodeType === 3 ? node.data : [node.localName, ...[...node.childNodes].map(tree)];
  for (const bar of element.querySelectorAll('.bar')) bar.remove();
  for (const each of element.querySelectorAll('.code, .wide_table')) each.replaceWith(...each.childNodes);
  return [tree(element), [...element.querySelectorAll('a')].map(a => a.getAttribute('href'))];
})"""

PIECES = """([text, cuts]) => import('/page/markdown.js').then(({ render }) => {
  const piecewise = document.createElement('div'), whole = document.createElement('div');
  for (const cut of cuts) render(piecewise, text.slice(0, cut));
  render(piecewise, text);
  render(whole, text);
  return [piecewise.innerHTML, whole.innerHTML];
})"""

VOID = ("hr", "br")


class Tree(HTMLParser):
    """HTML as nested lists."""

    def __init__(self):
        super().__init__()
        self.stack = [["div"]]

    def handle_starttag(self, tag, attributes):
        made = [tag]
        self.stack[-1].append(made)
        if tag not in VOID:
            self.stack.append(made)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack.pop()[0] == tag

    def handle_data(self, text):
        self.stack[-1].append(text)


def plain(node):
    """Without what the two may differ in: white space, paragraphs in items, the level of headings."""
    if isinstance(node, str):
        return node
    children = []
    for child in map(plain, node[1:]):
        if node[0] == "li" and not isinstance(child, str) and child[0] == "p":
            children.extend(child[1:])
        else:
            children.append(child)
    merged = []
    for child in children:
        if isinstance(child, str) and merged and isinstance(merged[-1], str):
            merged[-1] += child
        else:
            merged.append(child)
    if node[0] != "code":
        merged = [" ".join(child.split()) if isinstance(child, str) else child for child in merged]
    else:
        merged = ["".join(merged).rstrip("\n")]
    name = {"h1": "h3", "h2": "h4", "s": "del"}.get(node[0], node[0])
    return [name, *(child for child in merged if child != "")]


def expected(text):
    tree = Tree()
    tree.feed(MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).render(text))
    return plain(tree.stack[0])


@pytest.fixture(scope="module")
def bare(browser, talking):
    with visit(browser, talking.url, DESKTOP) as page:
        yield page


def test_it_shows_what_markdown_it_shows(bare):
    tree, links = bare.evaluate(TREE, DOCUMENT)
    assert plain(tree) == expected(DOCUMENT)
    assert links == ["https://example.org/a_(b)?x=1&y=2"]


def test_pieces_show_what_the_whole_shows(bare):
    drawn = random.Random(5)
    parts = DOCUMENT.split("\n\n")
    for _ in range(30):
        text = "\n\n".join(drawn.sample(parts, 6))
        text = text[: drawn.randrange(len(text))]  # an answer may end anywhere
        piecewise, whole = bare.evaluate(PIECES, [text, sorted(drawn.sample(range(len(text) + 1), len(text) // 8))])
        assert piecewise == whole


HARMFUL = [
    "<script>window.hit = 1</script>",
    '<img src="http://127.0.0.1:9/x.png" onerror="window.hit = 1">',
    "![picture](http://127.0.0.1:9/x.png)",
    "[press](javascript:window.hit=1)",
    "[press](JaVaScRiPt:window.hit=1) [press](data:text/html,<script>window.hit=1</script>)",
    "[press](  vbscript:x ) [press](//127.0.0.1:9/x) <javascript:window.hit=1>",
    '[press](https://a" onclick="window.hit=1)',
    "```html\n</code></pre><script>window.hit = 1</script>\n```",
    "`<script>window.hit = 1</script>`",
    "| <img src=x onerror=window.hit=1> |\n|---|\n| <svg onload=window.hit=1> |",
    "> " * 5000 + "deep",
    "- " * 5000 + "deep",
    "*a " * 3000 + "**b " * 3000 + "[" * 3000,
]


@pytest.mark.parametrize("text", HARMFUL, ids=range(len(HARMFUL)))
def test_it_is_harmless(bare, text):
    """``visit`` fails where anything else is loaded or an error occurs."""
    made = bare.evaluate(
        """text => import('/page/markdown.js').then(({ render }) => {
          const element = document.createElement('div');
          document.body.append(element);
          render(element, text);
          const all = [...element.querySelectorAll('*')];
          const found = {
            names: [...new Set(all.map(each => each.localName))],
            handlers: all.flatMap(each => each.getAttributeNames()).filter(name => name.startsWith('on')),
            links: all.filter(each => each.href !== undefined).map(each => each.href),
          };
          element.remove();
          return found;
        })""",
        text,
    )
    assert not {"script", "img", "svg", "iframe", "object", "style", "form"} & set(made["names"])
    assert made["handlers"] == []
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in made["links"])
    assert bare.evaluate("window.hit") is None
