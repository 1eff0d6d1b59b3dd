# %% [markdown]
# # Support
