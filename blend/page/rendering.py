"""Templates to pages."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_TEMPLATES = "templates"


def render(package: str, template: str, *, title: str, style: str, **values: object) -> str:
    """Return a page, the same for the same values.

    The template extends ``base.html`` and may import ``tokens.html``. What comes from elsewhere is escaped; it should
    have been cleaned (:func:`blend.page.text.cleaned`), too.

    Args:
        package: whose directory ``templates`` has the template.
        title: the page's.
        style: a style sheet beside the template, which comes behind the shared one.
        values: what the template reads.
    """
    script = _source(__package__, "script.js")
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, _TEMPLATES) for name in (package, __package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        title=title,
        style=Markup(_source(__package__, "style.css") + _source(package, style)),
        script=Markup(script),
        # With its digest allowed and nothing else, no other script runs, whatever the values say.
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        **values,
    )


def _source(package: str, name: str) -> str:
    return files(package).joinpath(_TEMPLATES, name).read_text("utf-8")
