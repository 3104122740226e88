"""What pages of HTML share: style, script, token maps, numbers, and how foreign text gets in.

A page is one file that asks for nothing else, serves light and dark, screens from 360 pixels on, and paper.
"""

from blend.page.rendering import render
from blend.page.tokens import Map, Piece, Token, token_map

__all__ = ["Map", "Piece", "Token", "render", "token_map"]
