#!/usr/bin/env bash
# Make echarts.min.js anew from released packages. Change the releases here and in README.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
echarts=6.1.0
esbuild=0.28.2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cp "$here/entry.js" "$place/"
cd "$place"
npm install --no-audit --no-fund --ignore-scripts "echarts@$echarts" "esbuild@$esbuild" >/dev/null
node_modules/.bin/esbuild entry.js --bundle --minify --format=iife --global-name=echarts --target=es2020 \
    --legal-comments=none --outfile=made.js \
    --banner:js="/*! Apache ECharts $echarts, The Apache Software Foundation, Apache-2.0; holds zrender (BSD-3-Clause) and tslib (0BSD): LICENCES.txt */"
cp made.js "$here/echarts.min.js"
{
    echo "echarts.min.js holds Apache ECharts $echarts under the Apache License 2.0 (the licence of this project too), with this notice:"
    echo
    cat node_modules/echarts/NOTICE
    for name in "parts of d3:echarts/licenses/LICENSE-d3" "zrender:zrender/LICENSE" "tslib:tslib/LICENSE.txt"; do
        printf '\n\n== %s\n\n' "${name%%:*}"
        cat "node_modules/${name#*:}"
    done
} >"$here/LICENCES.txt"
ls -l "$here/echarts.min.js"
