"""Choose the options of a method on validation rows: for a recipe, or for a training loop of one's own."""
