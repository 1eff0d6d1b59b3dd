"""What every host does with a batch: micro-batches, the student's forward, gradients."""
