"""Who scores rollouts: served models, models in this process, mixtures, the policy itself."""
