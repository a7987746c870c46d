NOT_COUNTED = -100  # the label that the loss passes over
