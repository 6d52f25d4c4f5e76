{{- define "warmroute.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ include "warmroute.name" . }}
{{- end }}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
{{- end }}

{{- /* The config: what the values name by themselves, under what `config` says. */ -}}
{{- define "warmroute.config" -}}
{{- $workers := dict "kubernetes" .Values.workers "zone_file" "/etc/podinfo/zone" }}
{{- if .Values.apiKeySecret }}{{ $_ := set $workers "api_key_file" "/etc/warmroute-api-key/api-key" }}{{ end }}
{{- $own := dict "listen" "0.0.0.0:8000" "admin" "0.0.0.0:9900" "mode" .Values.mode "workers" $workers }}
{{- if .Values.hashKeySecret }}{{ $_ := set $own "cache" (dict "hash_key_file" "/etc/warmroute-hash-key/hash-key") }}{{ end }}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.config)) }}
{{- end }}
