"""Codecs: each turns one block of bytes into stored bytes and back."""
