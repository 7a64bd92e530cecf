# bash completion for alfish
_alfish() {
    local IFS=$' \t\n'
    local word=${COMP_LINE:0:COMP_POINT} prefix=
    word=${word##* }
    local value=${word#*=}
    # Where '=' breaks words, bash replaces only what follows it.
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=${word%%=*}=
    COMPREPLY=()
    case $word in
        --gin_file=*) COMPREPLY=($(compgen -P "$prefix" -W "$_alfish_confs" -- "$value")
                                 $(compgen -P "$prefix" -f -X '!*.gin' -- "$value")) ;;
        --gin_param=*=*) ;;
        --gin_param=*) compopt -o nospace
            COMPREPLY=($(compgen -P "$prefix" -S = -W "$_alfish_params" -- "$value")) ;;
        --root_dir=*) compopt -o filenames; COMPREPLY=($(compgen -P "$prefix" -d -- "$value")) ;;
        --*=*) compopt -o filenames; COMPREPLY=($(compgen -P "$prefix" -f -- "$value")) ;;
        -*) compopt -o nospace
            local flags=_alfish_flags_${COMP_WORDS[1]//-/_}
            COMPREPLY=($(compgen -W "${!flags}" -- "$word")) ;;
        *) if [[ $COMP_CWORD == 1 ]]; then
               COMPREPLY=($(compgen -W "$_alfish_commands" -- "$word"))
           elif [[ ${COMP_WORDS[1]} == params ]]; then
               COMPREPLY=($(compgen -W "$_alfish_params" -- "$word"))
           elif [[ ${COMP_WORDS[1]} == confs ]]; then
               COMPREPLY=($(compgen -W "$_alfish_confs" -- "$word"))
           else
               compopt -o filenames; COMPREPLY=($(compgen -f -- "$word"))
           fi ;;
    esac
}
complete -F _alfish alfish
