# zsh completion for alfish
_alfish() {
    local flags=_alfish_flags_${words[2]//-/_}
    case $PREFIX in
        --gin_file=*) compset -P '*='; compadd ${=_alfish_confs}; _files -g '*.gin' ;;
        --gin_param=*=*) ;;
        --gin_param=*) compset -P '*='; compadd -S = ${=_alfish_params} ;;
        --root_dir=*) compset -P '*='; _files -/ ;;
        --*=*) compset -P '*='; _files ;;
        -*) compadd -S '' -- ${=${(P)flags}} ;;
        *) if (( CURRENT == 2 )); then compadd ${=_alfish_commands}
           elif [[ ${words[2]} == params ]]; then compadd ${=_alfish_params}
           elif [[ ${words[2]} == confs ]]; then compadd ${=_alfish_confs}
           else _files
           fi ;;
    esac
}
if [[ ${funcstack[1]} == _alfish ]]; then _alfish; else compdef _alfish alfish; fi  # autoloaded, or sourced
