"""Back ends: where files of a checkpoint lie."""
