_verl() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@VERBS@" -- "$word"))
    else
        COMPREPLY=($(compgen -W "@KEYS@" -- "$word"))
        [[ ${COMPREPLY-} == *= ]] && compopt -o nospace
    fi
}
complete -o default -F _verl verl
