"""What goes where: save and load planners, geometry, balance."""
