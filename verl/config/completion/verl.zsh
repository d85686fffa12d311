#compdef verl
_verl() {
    if ((CURRENT == 2)); then
        compadd @VERBS@
    elif compset -P '*='; then
        _files
    else
        compadd -S '' -- @KEYS@
    fi
}
compdef _verl verl
