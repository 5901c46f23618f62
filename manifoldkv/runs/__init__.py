"""What a long run needs: checkpoints to go on from, and a place to compute."""
