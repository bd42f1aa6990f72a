"""What one record moves inside of a run, with all other numbers held fixed."""
