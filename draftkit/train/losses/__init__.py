"""What all recipes minimize: one table of losses, computed in float32 without ever keeping a row of logits."""
