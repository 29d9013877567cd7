"""Styled lines and the thin Textual widgets that draw them."""
