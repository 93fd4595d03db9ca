"""What a study around bayesify needs: data, models, training, evaluation and reports."""
