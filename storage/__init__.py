"""Bytes: format, codecs, pipelines, back ends, publishing."""
