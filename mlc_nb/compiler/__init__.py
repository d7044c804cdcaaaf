"""From a model's structure to a library bundle, in a child process only; the room that imports TVM's compiler."""
