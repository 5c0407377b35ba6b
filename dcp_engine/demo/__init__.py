"""The main job: a training run that dies and comes back on another topology."""
